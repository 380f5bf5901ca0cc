"""Tar shards: the members of a sample, and the index of the samples by byte offsets.

A sample consists of adjacent members whose names are equal up to the first dot of the file name, its key (`sample_of`).
The kind of a member is what follows this dot, such as `jpg` or `syn.json`.

A tar file has no table of contents, so all headers are read once to create the index, which is stored beside the shard
or in a cache. With the index, each sample is read by one read operation, in any order: the data is not copied, and no
position of a stream has to be restored.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import lzma
import multiprocessing
import os
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np

from ...common.errors import UserError
from ..base.faults import BadSample
from .cache import SHOWN_AFTER, Arrays, cached_arrays
from .remote import is_remote, open_file, read_range, size_of
from .tar_scan import BLOCK, TarIndex, scan_plain

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
TEXT_KEYS = ("txt", "text", "caption", "cap")
_MAX_UID_LENGTH = 1024  # indexes hold the uids in an array of fixed width
HEADERS = 2**12
"""Bytes that are read ahead where only headers and texts of a file by URL are read."""
_FEW = 4
"""Number of shards from which on other processes index them."""
_REMOTE_AT_ONCE = 32
STALE = "another sample than in the index"
TAR_ERRORS = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError)
"""Errors that damaged tar files raise, also in compressed content and in numbers of extended headers."""


def split_name(name: str) -> tuple[str, str] | None:
    """Split the name of a member into key and kind, such as `("00/12", "syn.json")`; None for names without a dot."""
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    return (f"{folder}{slash}{stem}", kind.lower()) if stem and dot else None


def sample_of(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the key of the sample that a member belongs to, and the kind of the member; None for other members."""
    return split_name(member.name) if member.isfile() else None


@contextlib.contextmanager
def require_tar(file: str) -> Iterator[None]:
    """Raise errors of a tar file that is read in the context as errors for the user, with the name of the file.

    Raises:
        UserError: If the file is not a tar file, or is damaged.
    """
    try:
        yield
    except TAR_ERRORS as error:
        raise UserError(f"Expected a readable tar file, got {file!r} ({error}): copy the file again.") from error


def sample_spans(file: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield key, first byte, and byte after the end of the samples of an uncompressed shard; reads headers only.

    Raises:
        UserError: If the file is not a tar file, is truncated, or is damaged.
    """
    current: tuple[bytes, int, int] | None = None
    for key, start, stop in _member_spans(file):
        if current is not None and current[0] == key:
            current = key, current[1], stop
            continue
        if current is not None:
            yield current
        current = key, start, stop
    if current is not None:
        yield current


def _member_spans(file: str) -> Iterator[tuple[bytes, int, int]]:
    size = size_of(file)
    with require_tar(file), open_file(file, block=HEADERS) as content:
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for member in tar:
                stop = member.offset_data + -(-member.size // BLOCK) * BLOCK
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("it is truncated")
                if (names := sample_of(member)) is not None:
                    yield os.fsencode(names[0]), member.offset, stop  # names need not be UTF-8
            end = tar.offset
        # The library treats a damaged header as the end of the archive.
        content.seek(end)
        if content.read(BLOCK).strip(b"\0"):
            raise tarfile.ReadError(f"a damaged header at byte {end}")


def read_members(file: str, start: int, stop: int, name: str, key: bytes) -> dict[str, bytes]:
    """Read the members of the sample from byte `start` up to byte `stop` by kind, such as `jpg` and `syn.json`.

    Raises:
        BadSample: If the file has changed, or cannot be read.
    """
    try:
        if is_remote(file):
            block = read_range(file, start, stop)
        else:
            with open(file, "rb") as content:
                content.seek(start)
                block = content.read(stop - start)
        contents = plain_members(block)
        if contents is None:
            with tarfile.open(fileobj=io.BytesIO(block), mode="r:") as tar:
                contents = [
                    (member.name, block[member.offset_data : member.offset_data + member.size])
                    for member in tar
                    if member.isfile()
                ]
    except (OSError, MemoryError, *TAR_ERRORS):
        raise BadSample("unreadable shard", name) from None
    members = [(names, data) for path, data in contents if (names := split_name(path)) is not None]
    if {os.fsencode(stem) for (stem, _), _ in members} != {key}:  # the shard was replaced by one of equal size
        raise BadSample(STALE, name)
    return {kind: data for (_, kind), data in members}


def plain_header(header: bytes) -> tuple[str, int] | None:
    """Return name and size of the file that a header describes; None if it is of another kind than a plain file's."""
    try:
        size = int(header[124:135], 8)
        total = int(header[148:154], 8)
    except ValueError:
        return None
    if header[156:157] not in (b"0", b"\0") or total != sum(header) - sum(header[148:156]) + 8 * 32:
        return None
    return _name_in(header), size


def plain_members(block: bytes) -> list[tuple[str, bytes]] | None:
    """Return name and content of the members; None if a header is of another kind than that of a plain file.

    The reader of the library takes half a millisecond per sample, an eighth of the time to decode the image.
    """
    members: list[tuple[str, bytes]] = []
    offset = 0
    while offset < len(block):
        described = plain_header(block[offset : offset + BLOCK])
        if described is None:
            return None
        name, size = described
        start = offset + BLOCK
        offset = start + -(-size // BLOCK) * BLOCK
        if offset > len(block):
            return None
        members.append((name, block[start : start + size]))
    return members


def _name_in(header: bytes) -> str:
    """Return the name of a plain file from its header."""
    name, prefix = (field.partition(b"\0")[0] for field in (header[:100], header[345:500]))
    return os.fsdecode(prefix + b"/" + name if prefix else name)


def key_in(header: bytes) -> bytes:
    """Return the key of the sample that a header belongs to; empty if it belongs to no sample."""
    names = split_name(_name_in(header))
    return os.fsencode(names[0]) if names is not None else b""


# Content of the members


def caption_of(members: dict[str, bytes]) -> list[str]:
    """Return a list with the real caption, or an empty list if there is none."""
    data = next((members[kind] for kind in TEXT_KEYS if kind in members), None)
    return [] if data is None else [data.decode("utf-8", errors="replace")]


def uid_of(members: dict[str, bytes]) -> str:
    """Return the entry `uid` of the member `json`, or an empty string if there is no usable one."""
    uid = json_of(members, "json").get("uid")
    return str(uid) if isinstance(uid, (str, int)) and len(str(uid)) <= _MAX_UID_LENGTH else ""


def json_of(members: dict[str, bytes], kind: str) -> dict[str, object]:
    """Return the JSON object in a member, or an empty one if there is none."""
    try:
        value = json.loads(members.get(kind, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# Index


def tar_index(file: str, cache: Path) -> TarIndex:
    """Return the index of a shard: the index beside it, or else the cached index, or else a new one.

    Copying a shard with its index changes the modification times, so an index beside a shard is checked by its content:
    some samples are looked up here, and `read_members` checks each sample that is read.

    Raises:
        UserError: If the file is not a tar file, is truncated, or is damaged.
    """
    beside = _index_beside(file)
    return beside or TarIndex(**cached_arrays(file, cache, "index", lambda: _read_index(file)._asdict()))


def tar_indexes(files: Sequence[str], cache: Path) -> list[TarIndex]:
    """Return the index of each shard as `tar_index` does, read by as many processes as there are cores.

    Raises:
        UserError: As `tar_index`, or if one of the processes is killed.
    """
    from datasets.utils import tqdm

    processes = min(available_cores(), len(files))
    start = time.perf_counter()
    progress = tqdm(total=len(files), unit=" shards", delay=SHOWN_AFTER, desc=f"Indexing {len(files):,} tar files")
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress)
        read = partial(tar_index, cache=cache)
        if processes < 2 or len(files) < _FEW or multiprocessing.current_process().daemon:
            results: Iterator[TarIndex] = map(read, files)
        elif is_remote(files[0]):  # each read waits for the network
            results = stack.enter_context(ThreadPoolExecutor(_REMOTE_AT_ONCE)).map(read, files)
        else:
            # A `multiprocessing.Pool` ends its workers by a signal after an error, which can wait forever for a worker
            # that does not die of it; and it waits forever for the result of a worker that was killed for memory.
            context = multiprocessing.get_context("fork")
            pool = stack.enter_context(ProcessPoolExecutor(processes, context))
            results = pool.map(read, files, chunksize=4)
        indexes = []
        try:
            for index in results:
                indexes.append(index)
                progress.update()
        except BrokenProcessPool as error:
            raise UserError(
                "A process that reads tar files was killed, probably because the memory was used up: free memory and "
                "start again, which continues after the files that are already indexed."
            ) from error
    seconds = time.perf_counter() - start
    if seconds > SHOWN_AFTER:
        samples = sum(len(index.start) for index in indexes)
        log.info("Indexed %s samples of %s tar files in %.0f s", f"{samples:,}", f"{len(files):,}", seconds)
    return indexes


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_index(file: str) -> TarIndex:
    if not is_remote(file) and (plain := scan_plain(file)) is not None:
        return plain
    spans = list(sample_spans(file))
    keys, starts, stops = zip(*spans, strict=True) if spans else ((), (), ())
    return TarIndex(np.array(starts, np.int64), np.array(stops, np.int64), np.array(keys, np.bytes_))


def index_beside(path: Path) -> Path:
    """Return the path of the index that belongs to a shard."""
    return path.with_name(f"{path.stem}.index.json")


def _index_beside(file: str) -> TarIndex | None:
    """Return the index beside a shard; None if there is no index, or it belongs to another file."""
    try:
        with open_file(f"{os.path.splitext(file)[0]}.index.json") as content:
            saved = json.loads(content.read())
        size = size_of(file)
        if saved["bytes"] != size:
            return None
        start, stop = (np.array(saved[name], np.int64) for name in ("start", "stop"))
        index = TarIndex(start, stop, np.array([os.fsencode(key) for key in saved["keys"]], np.bytes_))
        return index if _matches(index, file, size) else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def _matches(index: TarIndex, file: str, size: int) -> bool:
    """Return whether an index fits a shard: all offsets are in the file, and the probed samples have their keys."""
    start, stop, keys = index
    if not start.shape == stop.shape == keys.shape == (len(keys),):
        return False
    if not len(keys):
        return True
    if (start < 0).any() or (stop <= start).any() or (start[1:] < stop[:-1]).any() or stop[-1] > size:
        return False
    with open_file(file, block=BLOCK) as content:
        for sample in {0, len(keys) // 2, len(keys) - 1}:
            content.seek(int(start[sample]))
            if key_in(content.read(BLOCK)) != keys[sample]:
                return False
    return True


def tar_uids(file: str, index: TarIndex, cache: Path) -> np.ndarray:
    """Return the `uid` in the `json` of each sample, bytes [N], empty without one; cached like the index."""

    def read() -> Arrays:
        spans = zip(index.start.tolist(), index.stop.tolist(), index.keys.tolist(), strict=True)
        return {"uids": np.array([uid(*span) for span in spans], np.bytes_)}

    def uid(start: int, stop: int, key: bytes) -> bytes:
        try:
            return uid_of(read_members(file, start, stop, file, key)).encode(errors="surrogatepass")
        except BadSample:
            return b""  # counted as a bad row when the sample is read

    return cached_arrays(file, cache, "uids", read)["uids"]
