"""Streamed sources that the `datasets` library reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..base.faults import ROW_ERRORS, unreadable
from .record import FAULT

READ_AT_ONCE = 64


class LibrarySource:
    """Streamed source with an unknown number of rows (JSON, CSV, the hub).

    Args:
        data: a `datasets.IterableDataset` whose images are not decoded.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.num_shards: int = data.num_shards

    def count(self, shard: int) -> int | None:
        """Return None, since the number of rows of a shard is unknown."""
        return None

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a shard by column, starting at row `start`."""
        return itertools.islice(self._read(self.data, shard), start, None)

    @staticmethod
    def _read(data: Any, shard: int) -> Iterator[dict[str, Any]]:
        part = data.shard(num_shards=data.num_shards, index=shard)
        # Not iteration over rows, which would divide the shard among the loader workers again.
        for columns in part.iter(batch_size=READ_AT_ONCE):
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


class ParquetSource(LibrarySource):
    """Streamed Parquet files on disk; reading starts at the row group of the first row.

    Args:
        data: a `datasets.IterableDataset` with one shard per file.
        files: the files in the order of the shards.
    """

    def __init__(self, data: Any, files: Sequence[str]) -> None:
        super().__init__(data)
        self.files = list(files)
        self._groups: dict[int, list[int]] = {}

    def count(self, shard: int) -> int | None:
        """Return the number of rows of a file, from its metadata."""
        return sum(self._group_sizes(shard))

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a file by column, starting at row `start`."""
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
                # One by one: text that is not UTF-8 in one row would fail the conversion of all rows.
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
