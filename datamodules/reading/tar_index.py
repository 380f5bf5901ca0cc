"""Indexes of tar shards: the byte offsets of each sample, stored beside the shard or in a cache.

A tar file has no table of contents, so all headers are read once to create the index. With the index, each sample is
read by one read operation, in any order: the data is not copied, and no position of a stream has to be restored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..base.faults import BadSample
from .cache import Arrays, cached_arrays
from .members import uid_of
from .remote import open_file, size_of
from .tar import BLOCK, key_in, read_members, sample_spans


class TarIndex(NamedTuple):
    """Byte offsets and keys of the samples of a shard, in their order."""

    start: np.ndarray  # int64 [N], byte of the first header
    stop: np.ndarray  # int64 [N], byte after the last member
    keys: np.ndarray  # bytes [N]


def tar_index(file: str, cache: Path) -> TarIndex:
    """Return the index of a shard: the index beside it, or else the cached index, or else a new one.

    Copying a shard with its index changes the modification times, so an index beside a shard is checked by its content:
    some samples are looked up here, and `read_members` checks each sample that is read.

    Args:
        file: absolute path or URL.
        cache: folder of the cached indexes.

    Raises:
        UserError: If the file is not a tar file, is truncated, or is damaged.
    """
    beside = _index_beside(file)
    return beside or TarIndex(**cached_arrays(file, cache, "index", lambda: _read_index(file)._asdict()))


def _read_index(file: str) -> TarIndex:
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
            kept = json.loads(content.read())
        size = size_of(file)
        if kept["bytes"] != size:
            return None
        start, stop = (np.array(kept[name], np.int64) for name in ("start", "stop"))
        index = TarIndex(start, stop, np.array([os.fsencode(key) for key in kept["keys"]], np.bytes_))
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
        for place in {0, len(keys) // 2, len(keys) - 1}:
            content.seek(int(start[place]))
            if key_in(content.read(BLOCK)) != keys[place]:
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
