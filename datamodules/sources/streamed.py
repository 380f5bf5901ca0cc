"""Streamed sources, shard by shard: how many rows each shard has, where that is known, and its rows from any one on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.decode import ROW_ERRORS, unreadable
from .records import FAULT, TAR_ERRORS, tar_records, tar_starts
from .tar import Arrays, cached_arrays

READ_AT_ONCE = 64


class StreamedSource:
    """A source that is read through the ``datasets`` library (JSON, CSV, the hub), in which nobody has counted rows.

    Args:
        data: a ``datasets.IterableDataset`` whose images are not decoded.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.num_shards: int = data.num_shards

    def count(self, shard: int) -> int | None:
        """Rows of a shard, None where only reading them would tell."""
        return None

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of a shard from one on, by column."""
        return itertools.islice(self._read(self.data, shard), start, None)

    @staticmethod
    def _read(data: Any, shard: int) -> Iterator[dict[str, Any]]:
        part = data.shard(num_shards=data.num_shards, index=shard)
        # `iter(batch_size=...)`, because iteration row by row would divide the shard among loader workers once more.
        for columns in part.iter(batch_size=READ_AT_ONCE):
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


class ParquetSource(StreamedSource):
    """Parquet files on disk: reading begins at the row group that holds the row.

    Args:
        data: a ``datasets.IterableDataset`` with a shard for each file.
        files: the files, in that order.
    """

    def __init__(self, data: Any, files: Sequence[str]) -> None:
        super().__init__(data)
        self.files = list(files)
        self._groups: dict[int, list[int]] = {}

    def count(self, shard: int) -> int | None:
        """Rows of a file, by its metadata."""
        return sum(self._group_sizes(shard))

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of a file from one on, by column."""
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
                # One by one: text that is not UTF-8 in one row would end the batch of all.
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
    """WebDataset shards: reading begins at the sample's first header.

    The headers of a shard are read only when its samples are counted, and the places kept in a cache.

    Args:
        files: absolute paths.
        caption: key of the caption.
        image_id: key of the image's id; None: "image_id" where there is one.
        cache: folder for the places of the samples.
    """

    def __init__(self, files: Sequence[str], caption: str, image_id: str | None, cache: Path) -> None:
        self.files = list(files)
        self.num_shards = len(self.files)
        self.caption = caption
        self.image_id = image_id
        self.cache = cache
        self._starts: dict[int, np.ndarray | None] = {}

    def count(self, shard: int) -> int | None:
        """Samples of a shard; None where it is compressed or damaged, since it then can be read from its start only."""
        starts = self._places(shard)
        return None if starts is None else len(starts)

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The samples of a shard from one on, by column."""
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
