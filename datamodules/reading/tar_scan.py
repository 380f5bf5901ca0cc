"""The index of the samples of a plain tar file, from its headers alone.

The reader of the library creates an object for each member: some 55,000 headers a second on one core. Here a loop only
follows the sizes from header to header; what is in the headers is checked and read by numpy.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np

BLOCK = 512
"""Block size of the tar format, bytes."""
_SIZE = slice(124, 135)
_SUM = slice(148, 156)
_PREFIX = slice(345, 500)
_AT_ONCE = 2**14
"""Headers whose bytes are in memory at the same time."""
_SLASH, _DOT, _ZERO = b"/.0"


class TarIndex(NamedTuple):
    """Byte offsets and keys of the samples of a shard, in their order."""

    start: np.ndarray  # int64 [N], byte of the first header
    stop: np.ndarray  # int64 [N], byte after the last member
    keys: np.ndarray  # bytes [N]


def scan_plain(file: str) -> TarIndex | None:
    """Return the index of a local tar file that has plain files only; None for any other, also a damaged one."""
    with open(file, "rb") as content:
        try:
            mapped = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError):  # an empty file, or one that cannot be mapped
            return None
        with mapped:
            offsets = _follow(mapped)
            if offsets is None:
                return None
            blocks = np.frombuffer(mapped, np.uint8, len(mapped) // BLOCK * BLOCK).reshape(-1, BLOCK)
            try:
                places = offsets[:-1] // BLOCK
                parts = [_keys(blocks[places[at : at + _AT_ONCE]]) for at in range(0, len(places), _AT_ONCE)]
            finally:
                del blocks  # or the map cannot be closed
    if any(part is None for part in parts):
        return None
    keys = np.concatenate([np.zeros(0, "S1"), *(part for part in parts if part is not None)])
    member = np.flatnonzero(keys != b"")
    keys = keys[member]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    last = np.append(first[1:], len(keys))[: len(first)] - 1
    return TarIndex(offsets[member[first]], offsets[member[last] + 1], keys[first])


def _follow(mapped: mmap.mmap) -> np.ndarray | None:
    """Return the byte of each header, and that after the last member, int64 [N + 1]; None for an unusual file."""
    at = 0
    end = len(mapped)
    offsets: list[int] = []
    add = offsets.append
    try:
        while at < end:
            size = int(mapped[at + 124 : at + 135], 8)
            if size < 0:
                return None
            add(at)
            at += (size + 1023) & -BLOCK
    except ValueError:  # the end of the archive, or another form of a number
        if mapped[at : at + BLOCK].strip(b"\0"):
            return None
    return None if at > end else np.array([*offsets, at], np.int64)


def _keys(headers: np.ndarray) -> np.ndarray | None:
    """Return the key of each member, empty for one of no sample, bytes [N]; None if one is not a plain file.

    Args:
        headers: uint8 [N, 512].
    """
    kind, after_size = headers[:, 156], headers[:, 135]
    digits = headers[:, _SUM][:, :6].astype(np.int64) - _ZERO
    if not (
        ((kind == _ZERO) | (kind == 0)).all()
        and ((after_size == 0) | (after_size == ord(" "))).all()
        and not headers[:, _PREFIX].any()
        and ((digits >= 0) & (digits < 8)).all()
    ):
        return None
    stated = digits @ (8 ** np.arange(5, -1, -1))
    if (stated != _sums(headers) - headers[:, _SUM].sum(1, dtype=np.int64) + 8 * ord(" ")).any():
        return None
    names = headers[:, :100]
    ends = names == 0
    length = np.where(ends.any(1), ends.argmax(1), 100)[:, None]
    width = int(length.max(initial=1))
    names = names[:, :width]
    places = np.arange(width, dtype=np.int16)
    before = places < length
    base = np.where((names == _SLASH) & before, places + 1, 0).max(1, initial=0)[:, None]
    dots = (names == _DOT) & (places >= base) & before
    dot = dots.argmax(1)[:, None]
    has_key = dots.any(1)[:, None] & (dot > base)
    longest = max(int(dot.max(initial=1)), 1)
    keys = np.where((places < dot) & has_key, names, 0).astype(np.uint8)[:, :longest]
    return np.ascontiguousarray(keys).view(f"S{longest}")[:, 0]


def _sums(headers: np.ndarray) -> np.ndarray:
    """Return the sum of the bytes of each header, int64 [N]: eight bytes at a time, in lanes of 16 bits."""
    words = np.ascontiguousarray(headers).view(np.uint64)  # [N, 64]
    lanes = np.uint64(0x00FF00FF00FF00FF)
    pairs = (words & lanes) + ((words >> np.uint64(8)) & lanes)  # at most 2 * 255 a lane
    return pairs.sum(1, dtype=np.uint64).view(np.uint16).reshape(-1, 4).sum(1, dtype=np.int64)
