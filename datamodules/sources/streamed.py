"""Streamed sources: the number of rows of each shard if known, and its rows from any one on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.faults import ROW_ERRORS, unreadable
from .layout import FAULT
from .tar import TAR_ERRORS
from .tar_index import Arrays, cached_arrays
from .tar_records import tar_records, tar_starts

READ_AT_ONCE = 64


class StreamedSource:
    """A source that the ``datasets`` library reads (JSON, CSV, the hub), with an unknown number of rows.

    Args:
        data: a ``datasets.IterableDataset`` whose images are not decoded.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.num_shards: int = data.num_shards

    def count(self, shard: int) -> int | None:
        """Return the number of rows of a shard, None if it is unknown."""
        return None

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a shard from one on, by column."""
        return itertools.islice(self._read(self.data, shard), start, None)

    @staticmethod
    def _read(data: Any, shard: int) -> Iterator[dict[str, Any]]:
        part = data.shard(num_shards=data.num_shards, index=shard)
        # `iter(batch_size=...)`, because iterating over rows would divide the shard among the loader workers again.
        for columns in part.iter(batch_size=READ_AT_ONCE):
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


class ParquetSource(StreamedSource):
    """Parquet files on disk; reading starts at the row group of the row.

    Args:
        data: a ``datasets.IterableDataset`` with a shard for each file.
        files: the files, in that order.
    """

    def __init__(self, data: Any, files: Sequence[str]) -> None:
        super().__init__(data)
        self.files = list(files)
        self._groups: dict[int, list[int]] = {}

    def count(self, shard: int) -> int | None:
        """Return the number of rows of a file, from its metadata."""
        return sum(self._group_sizes(shard))

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a file from one on, by column."""
        if not start:
            yield from super().rows(shard)
            return
        groups = self.data.shard(num_shards=self.num_shards, index=shard).reshard()
        for group, rows in enumerate(self._group_sizes(shard)):
            if start < rows:
                yield from itertools.islice(self._read(groups, group), start, None)
            start = max(start - rows, 0)

    @staticmethod
    def _read(data: Any, shard: int) -> Iterator[dict[str, Any]]:
        part = data.shard(num_shards=data.num_shards, index=shard).with_format("arrow")
        for table in part.iter(batch_size=READ_AT_ONCE):
            for row in range(table.num_rows):
                # One by one: text that is not UTF-8 in one row would fail the conversion of all.
                try:
                    yield {name: table[name][row].as_py() for name in table.column_names}
                except ROW_ERRORS as error:
                    yield {FAULT: unreadable(error, "").cause}

    def _group_sizes(self, shard: int) -> list[int]:
        from pyarrow import parquet

        if shard not in self._groups:
            metadata = parquet.read_metadata(self.files[shard])
            self._groups[shard] = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return self._groups[shard]


class TarSource(StreamedSource):
    """WebDataset shards; reading starts at the first header of the sample.

    The headers of a shard are read only when its samples are counted, and the places of the samples are cached.

    Args:
        files: absolute paths.
        caption: key of the caption.
        image_id: key of the image's id; None: "image_id" if it exists.
        cache: folder of the cached places of the samples.
    """

    def __init__(self, files: Sequence[str], caption: str, image_id: str | None, cache: Path) -> None:
        self.files = list(files)
        self.num_shards = len(self.files)
        self.caption = caption
        self.image_id = image_id
        self.cache = cache
        self._starts: dict[int, np.ndarray | None] = {}

    def count(self, shard: int) -> int | None:
        """Return the number of samples of a shard; None if it is compressed or damaged, and has no index."""
        starts = self._places(shard)
        return None if starts is None else len(starts)

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard from one on, by column."""
        starts = self._places(shard) if start else None
        if starts is None:
            yield from itertools.islice(tar_records(self.files[shard], self.caption, self.image_id), start, None)
        elif start < len(starts):
            yield from tar_records(self.files[shard], self.caption, self.image_id, int(starts[start]))

    def _places(self, shard: int) -> np.ndarray | None:
        if shard not in self._starts:
            file = self.files[shard]

            def make() -> Arrays:
                return {"start": np.array(tar_starts(file, self.caption), np.int64)}

            try:
                self._starts[shard] = cached_arrays(file, self.cache, f"samples with {self.caption}", make)["start"]
            except TAR_ERRORS:
                self._starts[shard] = None
        return self._starts[shard]
