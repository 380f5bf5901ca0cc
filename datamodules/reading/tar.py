"""Reader of tar shards: the assignment of members to samples, and the members of a sample at given offsets.

All readers of shards (records, indexes, reinforced samples) use `sample_of`: a sample consists of adjacent
members whose names are equal up to the first dot of the file name.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator

from ...common.errors import UserError
from ..base.faults import BadSample
from .remote import is_remote, open_file, read_range, size_of

BLOCK = 512
"""Block size of the tar format, bytes."""
HEADERS = 2**12
"""Bytes that are read ahead where only headers and texts of a file by URL are read."""
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
                found = sample_of(member)
                if found is not None:
                    yield os.fsencode(found[0]), member.offset, stop  # names need not be UTF-8
            end = tar.offset
        # The library treats a damaged header as the end of the archive.
        content.seek(end)
        if content.read(BLOCK).strip(b"\0"):
            raise tarfile.ReadError(f"a damaged header at byte {end}")


def read_members(file: str, start: int, stop: int, name: str, key: bytes) -> dict[str, bytes]:
    """Read the members of a sample by kind, such as `jpg` and `syn.json`.

    Args:
        file: the shard.
        start: first byte of the sample.
        stop: byte after the end of the sample.
        name: name of the sample in messages.
        key: key of the sample.

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
        found = _plain_members(block)
        if found is None:
            found = []
            with tarfile.open(fileobj=io.BytesIO(block), mode="r:") as tar:
                for member in tar:
                    if (names := sample_of(member)) is not None:
                        data = block[member.offset_data : member.offset_data + member.size]
                        found.append((os.fsencode(names[0]), names[1], data))
    except (OSError, MemoryError, *TAR_ERRORS):
        raise BadSample("unreadable shard", name) from None
    if {stem for stem, _, _ in found} != {key}:  # the shard was replaced by one of equal size
        raise BadSample(STALE, name)
    return {kind: content for _, kind, content in found}


def _plain_members(block: bytes) -> list[tuple[bytes, str, bytes]] | None:
    """Return key, kind and content of the members; None if a header is of another kind than that of a plain file.

    The reader of the library takes half a millisecond per sample, an eighth of the time to decode the image.
    """
    members: list[tuple[bytes, str, bytes]] = []
    place = 0
    while place < len(block):
        header = block[place : place + BLOCK]
        try:
            size, total = int(header[124:135], 8), int(header[148:154], 8)
        except ValueError:
            return None
        if header[156:157] not in (b"0", b"\0") or total != sum(header) - sum(header[148:156]) + 8 * 32:
            return None
        names = split_name(_name_in(header))
        start = place + BLOCK
        place = start + -(-size // BLOCK) * BLOCK
        if names is None or place > len(block):
            return None
        members.append((os.fsencode(names[0]), names[1], block[start : start + size]))
    return members


def _name_in(header: bytes) -> str:
    """Return the name of a plain file from its header."""
    name, prefix = (part.partition(b"\0")[0] for part in (header[:100], header[345:500]))
    return os.fsdecode(prefix + b"/" + name if prefix else name)


def key_in(header: bytes) -> bytes:
    """Return the key of the sample that a header belongs to; empty if it belongs to no sample."""
    names = split_name(_name_in(header))
    return os.fsencode(names[0]) if names is not None else b""
