"""Records of WebDataset shards, read in order or streamed from any record on."""

from __future__ import annotations

import itertools
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..base.decode import MAX_BYTES
from ..base.faults import BadSample
from ..base.text_files import parse_integer
from .cache import Arrays, cached_arrays
from .layout import Record, captions_in, identity_in, record
from .remote import BLOCK, current_retries, open_file, url_of_bytes
from .tar import HEADERS, IMAGE_SUFFIXES, TAR_ERRORS, TEXT_KEYS, require_tar, sample_of

SHARDS_AT_ONCE = 32
"""Number of shards by URL whose headers are read at the same time, since each read waits for the network."""


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
            for starts, kind, member in _record_members(tar, caption):
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


def tar_starts(file: str, caption: str, retries: int | None = None) -> list[int]:
    """Return the first byte of each record of a shard; only headers are read.

    Raises:
        tarfile.TarError: If the shard is compressed or damaged.
    """
    with open_file(file, retries, HEADERS) as content, tarfile.open(fileobj=content, mode="r:") as tar:
        return [member.offset for starts, _, member in _record_members(tar, caption) if starts]


def _record_members(tar: tarfile.TarFile, caption: str) -> Iterator[tuple[bool, str, tarfile.TarInfo]]:
    """Yield the members that belong to records: whether a member starts a record, its kind, and its header."""
    wanted = {*TEXT_KEYS, caption, "json"}
    current = ""
    begun = False
    for member in tar:
        names = sample_of(member)
        if names is None:
            continue
        key, kind = names
        if key != current:
            current = key
            begun = False
        image = f".{kind.rpartition('.')[2]}" in IMAGE_SUFFIXES
        if image or kind in wanted:
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

    The headers of a shard are read when its samples are counted, and the offsets of the samples are cached.

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
        self._starts: dict[int, np.ndarray | None] = {}

    def count(self, shard: int) -> int | None:
        """Return the number of samples of a shard; None if the shard is compressed or damaged."""
        starts = self._offsets(shard)
        return None if starts is None else len(starts)

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard by column, starting at sample `start`."""
        starts = self._offsets(shard) if start else None
        if starts is None:
            yield from itertools.islice(self._records(shard, 0), start, None)
        elif start < len(starts):
            yield from self._records(shard, int(starts[start]))

    def _records(self, shard: int, offset: int) -> Iterator[dict[str, Any]]:
        return tar_records(self.files[shard], self.caption, self.image_id, offset, self.retries)

    def _offsets(self, shard: int) -> np.ndarray | None:
        if shard not in self._starts:
            file = self.files[shard]

            def make() -> Arrays:
                return {"start": np.array(tar_starts(file, self.caption, self.retries), np.int64)}

            try:
                self._starts[shard] = cached_arrays(file, self.cache, f"samples with {self.caption}", make)["start"]
            except TAR_ERRORS:
                self._starts[shard] = None
        return self._starts[shard]
