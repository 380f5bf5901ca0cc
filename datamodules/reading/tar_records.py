"""Records of WebDataset shards, read in order or streamed from any record on."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from ..base.decode import MAX_BYTES
from ..base.faults import BadSample
from ..base.text_files import parse_integer
from .cache import Arrays, cached_arrays
from .layout import Record, captions_in, identity_in, record
from .remote import BLOCK, current_retries, is_remote, open_file, read_range, size_of, url_of_bytes
from .tar import (
    HEADERS,
    IMAGE_SUFFIXES,
    TAR_ERRORS,
    TEXT_KEYS,
    plain_header,
    plain_members,
    require_tar,
    sample_of,
    split_name,
)
from .tar_scan import BLOCK as TAR_BLOCK

SHARDS_AT_ONCE = 32
"""Number of shards by URL whose headers are read at the same time, since each read waits for the network."""
INDEXES = 256
"""Number of shards whose offsets are kept in memory, more than the order of a stream looks at together."""

Member = TypeVar("Member")


def read_tars(files: list[str], caption: str, image_id: str | None) -> Iterator[Record]:
    """Yield the records of WebDataset shards, in which adjacent members with the same key are a sample.

    The image is the member with the suffix of an image; the captions are the member `caption` or `txt`, or the
    entry `caption` of the member `json`. Other members, such as pickled ones, are not read. Arguments as in
    `tar_records`.

    Raises:
        UserError: If a file is not a tar file or is truncated.
    """
    for file in files:
        yield from tar_records(file, caption, image_id)


def read_remote_tars(files: list[str], caption: str, image_id: str | None) -> Iterator[Record]:
    """Yield the records of shards by URL as `read_tars` does, with the URL of an image's bytes instead of the image.

    Headers and texts are read, of several shards at once; an image is read when its row is.
    """
    retries = current_retries()  # which the threads do not know

    def records(file: str) -> list[Record]:
        return list(tar_records(file, caption, image_id, retries=retries, images=False))

    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        for records_of_file in pool.map(records, files):
            yield from records_of_file


def tar_records(
    file: str, caption: str, image_id: str | None, start: int = 0, retries: int | None = None, images: bool = True
) -> Iterator[Record]:
    """Yield the records of one shard as `read_tars` does, starting at the first byte of a record.

    Args:
        file: path or URL.
        caption: key of the caption.
        image_id: key of the image id in the member `json`; None for "image_id" if that exists.
        start: first byte of the first record.
        retries: as in `attempted`.
        images: whether to read the images; otherwise, of a file by URL, the path of an image is that of its bytes.
    """
    identity = "image_id" if image_id is None else image_id
    with require_tar(file), open_file(file, retries, BLOCK if images else HEADERS) as content:
        content.seek(start)
        with tarfile.open(fileobj=content, mode="r" if images else "r:") as tar:
            sample: dict[str, Any] = {}
            for starts, kind, member in _members_of(tar, caption):
                if starts and sample:
                    yield _record(sample, caption, identity)
                    sample = {}
                if member.size > MAX_BYTES:  # a sparse member can declare any size
                    sample["too large"] = b""
                    continue
                if kind == "image" and not images and not member.issparse():
                    sample["path"] = url_of_bytes(file, member.offset_data, member.size)
                    continue
                # Read before the next header, since a compressed file seeks backwards only by decompressing from the
                # start.
                content_of_member = tar.extractfile(member)
                sample[kind] = content_of_member.read() if content_of_member else b""
                if kind == "image":
                    # The name is for messages only, and need not be UTF-8.
                    sample["path"] = os.fsencode(member.name).decode("utf-8", errors="replace")
            if sample:
                yield _record(sample, caption, identity)


def records_in(block: bytes, caption: str, image_id: str | None) -> list[Record]:
    """Return the records in some bytes of an uncompressed shard, which begin and end with a record.

    Arguments as in `tar_records`. It is five times as fast as the library's reader where all members are plain files.

    Raises:
        tarfile.TarError: If the bytes are damaged.
    """
    identity = "image_id" if image_id is None else image_id
    contents = plain_members(block)
    if contents is None:
        with tarfile.open(fileobj=io.BytesIO(block), mode="r:") as tar:
            contents = [(member.name, _content_of(tar, member)) for member in tar if member.isfile()]
    samples: list[dict[str, Any]] = []
    members = ((split_name(name), (name, data)) for name, data in contents)
    for starts, kind, (name, data) in _record_members(members, caption):
        if starts:
            samples.append({})
        if len(data) > MAX_BYTES:
            samples[-1]["too large"] = b""
            continue
        samples[-1][kind] = data
        if kind == "image":
            samples[-1]["path"] = os.fsencode(name).decode("utf-8", errors="replace")
    return [_record(sample, caption, identity) for sample in samples]


def _content_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the content of a member, of which a sparse one can declare any size; at most `MAX_BYTES` and one."""
    content = tar.extractfile(member)
    return content.read(MAX_BYTES + 1) if content else b""


def tar_spans(file: str, caption: str, retries: int | None = None) -> tuple[list[int], list[int]]:
    """Return the first byte of each record of a shard, and the byte after its last member; only headers are used.

    Of a shard by URL, all is read if its members are small, since each read waits for the network.

    Raises:
        tarfile.TarError: If the shard is compressed or damaged.
    """
    with open_file(file, retries) as content:
        spans = _plain_spans(content, size_of(file, retries), caption)
        if spans is not None:
            return spans
        content.seek(0)
        starts: list[int] = []
        stops: list[int] = []
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for begins, _, member in _members_of(tar, caption):
                if begins:
                    starts.append(member.offset)
                    stops.append(0)
                stops[-1] = tar.offset
        return starts, stops


def _plain_spans(content: IO[bytes], size: int, caption: str) -> tuple[list[int], list[int]] | None:
    """Return the spans of the records of a shard of plain files, five times as fast as the library; None for another.

    Args:
        content: the shard.
        size: its bytes.
        caption: as in `tar_records`.
    """
    headers: list[tuple[tuple[str, str] | None, tuple[int, int]]] = []
    offset = 0
    while True:
        content.seek(offset)
        header = content.read(TAR_BLOCK)
        if offset and (not header or not header.strip(b"\0")):
            break
        described = plain_header(header)
        if described is None:
            return None
        name, length = described
        stop = offset + TAR_BLOCK + -(-length // TAR_BLOCK) * TAR_BLOCK
        if stop > size:
            return None
        headers.append((split_name(name), (offset, stop)))
        offset = stop
    starts: list[int] = []
    stops: list[int] = []
    for begins, _, (start, stop) in _record_members(headers, caption):
        if begins:
            starts.append(start)
            stops.append(0)
        stops[-1] = stop
    return starts, stops


def _members_of(tar: tarfile.TarFile, caption: str) -> Iterator[tuple[bool, str, tarfile.TarInfo]]:
    """Yield the members of a shard that belong to records, as `_record_members` does."""
    return _record_members(((sample_of(member), member) for member in tar), caption)


def _record_members(
    members: Iterable[tuple[tuple[str, str] | None, Member]], caption: str
) -> Iterator[tuple[bool, str, Member]]:
    """Yield the members that belong to records: whether a member starts a record, its kind, and the member.

    Args:
        members: key and kind of each member, None for others than samples, and the member.
        caption: as in `tar_records`.
    """
    kinds = {*TEXT_KEYS, caption, "json"}
    current = ""
    begun = False
    for names, member in members:
        if names is None:
            continue
        key, kind = names
        if key != current:
            current = key
            begun = False
        image = f".{kind.rpartition('.')[2]}" in IMAGE_SUFFIXES
        if image or kind in kinds:
            yield not begun, "image" if image else kind, member
            begun = True


def _record(sample: dict[str, Any], caption: str, image_id: str) -> Record:
    return record(lambda: _of_members(sample, caption, image_id))


def _of_members(sample: dict[str, Any], caption: str, image_id: str) -> Record:
    if "too large" in sample:
        raise BadSample("too large", "")
    fields: Any = {}
    if "json" in sample:
        try:
            fields = json.loads(sample["json"], parse_int=parse_integer)
        except (ValueError, RecursionError):  # the sample then has no caption, and is counted as a bad row
            fields = {}
    fields = fields if isinstance(fields, dict) else {}
    captions = captions_in(fields.get(caption))
    for key in (caption, *TEXT_KEYS):
        if key in sample and key != "image":
            captions = [sample[key].decode("utf-8", errors="replace")]
            break
    return {
        "image": {"bytes": sample.get("image"), "path": sample.get("path")},
        "caption": captions,
        "image_id": identity_in(fields.get(image_id)),
    }


class TarSource:
    """Streamed WebDataset shards; reading starts at the first header of a sample.

    The headers of a shard are read when its samples are counted, and the offsets of the samples are cached. A
    compressed shard is read from its start on, and is read to be counted.

    Args:
        files: absolute paths or URLs.
        caption: as in `tar_records`, like `image_id`.
        cache: folder of the cached offsets of the samples.
        retries: as in `attempted`.
    """

    def __init__(
        self, files: Sequence[str], caption: str, image_id: str | None, cache: Path, retries: int | None = None
    ) -> None:
        self.files = list(files)
        self.num_shards = len(self.files)
        self.caption = caption
        self.image_id = image_id
        self.cache = cache
        self.retries = retries
        self._counts: dict[int, int] = {}
        self._spans: OrderedDict[int, np.ndarray | None] = OrderedDict()

    def count(self, shard: int) -> int:
        """Return the number of samples of a shard.

        Raises:
            UserError: If the file is not a tar file or is truncated.
        """
        if shard not in self._counts:
            spans = self._offsets(shard)
            self._counts[shard] = self._read_count(shard) if spans is None else len(spans)
        return self._counts[shard]

    def chunk_starts(self, shard: int) -> None:
        """Return None, since a shard may be cut anywhere."""
        return

    def is_sequential(self, shard: int) -> bool:
        """Return whether a shard is compressed."""
        return self._offsets(shard) is None

    def is_remote(self) -> bool:
        """Return whether the shards are read by URL."""
        return any(is_remote(file) for file in self.files)

    def rows(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard by column, from sample `start` to sample `stop`, which are read at once.

        Raises:
            UserError: If the shard cannot be read.
        """
        spans = self._offsets(shard) if start or stop is not None else None
        if spans is None:
            yield from itertools.islice(self._records(shard, 0), start, stop)
        elif stop is None:
            yield from self._records(shard, int(spans[start, 0])) if start < len(spans) else ()
        elif start < min(stop, len(spans)):
            yield from self._at_once(shard, *spans[[start, min(stop, len(spans)) - 1], [0, 1]].tolist())

    def _at_once(self, shard: int, start: int, stop: int) -> list[Record]:
        """Return the records from byte `start` to byte `stop`."""
        file = self.files[shard]
        with require_tar(file):
            if is_remote(file):
                return records_in(read_range(file, start, stop, self.retries), self.caption, self.image_id)
            with open_file(file) as content:
                content.seek(start)
                return records_in(content.read(stop - start), self.caption, self.image_id)

    def _records(self, shard: int, offset: int) -> Iterator[dict[str, Any]]:
        return tar_records(self.files[shard], self.caption, self.image_id, offset, self.retries)

    def _read_count(self, shard: int) -> int:
        def make() -> Arrays:
            return {"count": np.array(sum(1 for _ in self._records(shard, 0)))}

        return int(cached_arrays(self.files[shard], self.cache, f"count with {self.caption}", make)["count"])

    def _offsets(self, shard: int) -> np.ndarray | None:
        """Return the first byte of each sample and the byte after its end, int64 [N, 2]; None of a compressed shard."""
        with contextlib.suppress(KeyError):
            return self._spans[shard]
        file = self.files[shard]

        def make() -> Arrays:
            return {"spans": np.array(tar_spans(file, self.caption, self.retries), np.int64).T}

        spans: np.ndarray | None
        try:
            spans = cached_arrays(file, self.cache, f"spans with {self.caption}", make)["spans"]
        except TAR_ERRORS:
            spans = None
        self._spans[shard] = spans
        if len(self._spans) > INDEXES:
            self._spans.popitem(last=False)
        return spans
