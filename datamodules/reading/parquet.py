"""Parquet files on disk and by URL, of which only the row groups that are needed are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from ...common.errors import UserError
from ..base.faults import ROW_ERRORS, BadSample, unreadable
from .csv_rows import refuse_duplicates
from .layout import FAULT, Record, captions_in, identity_in, record
from .lists import read_items
from .remote import is_remote, open_file
from .stream import READ_AT_ONCE

FOOTER = 2**16
"""Bytes that are read ahead, enough for most files' metadata; columns are read in whole chunks."""


def parquet_schema(file: str) -> pa.Schema:
    """Return the names and types of the columns of a file.

    Raises:
        UserError: If a name is not unique.
    """
    with open_file(file, block=FOOTER) as content:
        schema = parquet.read_schema(content)
    refuse_duplicates(schema.names, file)
    return schema


def column_names(file: str) -> list[str]:
    """Return the names of the columns of a file; arguments and errors as in `parquet_schema`."""
    names: list[str] = parquet_schema(file).names
    return names


def read_table_items(file: str) -> Iterator[Callable[[], Any]]:
    """Yield a function for each row of a Parquet file on a disk, or each item of a list, as `read_items` does.

    Raises:
        UserError: If the file has another form.
    """
    if not file.endswith(".parquet"):
        yield from read_items(file)
        return
    try:
        column_names(file)  # raises an error for a name that is not unique
        table = parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise UserError(f"Expected a Parquet file, got {file!r} ({error}): correct it.") from error
    with table:
        for batch in table.iter_batches(1000):
            yield from (lambda row=row: row for row in batch.to_pylist())


def read_parquets(
    files: list[str], image: str, caption: str, image_id: str | None, retries: int | None = None
) -> Iterator[Record]:
    """Yield the records of Parquet files; arguments as in `read_list`."""
    for file in files:
        yield from parquet_records(file, image, caption, image_id, 0, retries)


def parquet_records(
    file: str, image: str, caption: str, image_id: str | None, start: int = 0, retries: int | None = None
) -> Iterator[Record]:
    """Yield the records of one file as `read_parquets` does, from a row on; earlier row groups are not read."""
    identity = "image_id" if image_id is None else image_id
    with open_file(file, retries, FOOTER) as content:
        table = parquet.ParquetFile(content)
        columns = [name for name in (image, caption, identity) if name in table.schema_arrow.names]
        for group in range(table.metadata.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if start < rows:
                for row in _rows(table, group, columns, start):
                    yield record(lambda row=row: _of_row(row, image, caption, identity))  # type: ignore[misc]
            start = max(start - rows, 0)


def _rows(table: parquet.ParquetFile, group: int, columns: list[str], start: int) -> Iterator[dict[str, Any]]:
    for batch in table.iter_batches(READ_AT_ONCE, [group], columns):
        first, start = start, max(start - batch.num_rows, 0)
        for row in range(first, batch.num_rows):
            # One by one: text that is not UTF-8 in one row would fail the conversion of all rows.
            try:
                yield {name: batch[name][row].as_py() for name in columns}
            except ROW_ERRORS as error:
                yield {FAULT: unreadable(error, "").cause}


def _of_row(row: dict[str, Any], image: str, caption: str, image_id: str) -> Record:
    if FAULT in row:
        raise BadSample(row[FAULT], "")
    value = row[image]
    if isinstance(value, dict):
        content = {"bytes": value.get("bytes"), "path": value.get("path")}
    else:
        content = {"bytes": None, "path": value} if isinstance(value, str) else {"bytes": value, "path": None}
    return {"image": content, "caption": captions_in(row.get(caption)), "image_id": identity_in(row.get(image_id))}


class ParquetSource:
    """Streamed Parquet files; reading starts at the row group of the first row. Arguments as in `read_list`."""

    def __init__(self, files: Sequence[str], image: str, caption: str, image_id: str | None, retries: int) -> None:
        self.files = list(files)
        self.columns = (image, caption, image_id)
        self.retries = retries
        self.num_shards = len(self.files)
        self._starts: dict[int, np.ndarray] = {}

    def count(self, shard: int) -> int:
        """Return the number of rows of a file, from its metadata."""
        return int(self._bounds(shard)[-1])

    def chunk_starts(self, shard: int) -> np.ndarray:
        """Return the first rows of the row groups of a file, which are read whole."""
        return self._bounds(shard)[:-1]

    def is_sequential(self, shard: int) -> bool:
        """Return False, since reading starts at any row group."""
        return False

    def is_remote(self) -> bool:
        """Return whether the files are read by URL."""
        return any(is_remote(file) for file in self.files)

    def rows(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records of a file, from row `start` to row `stop`."""
        records = parquet_records(self.files[shard], *self.columns, start, self.retries)
        return records if stop is None else itertools.islice(records, max(stop - start, 0))

    def _bounds(self, shard: int) -> np.ndarray:
        """Return the first rows of the row groups, and the number of rows, int64 [groups + 1]."""
        if shard not in self._starts:
            with open_file(self.files[shard], self.retries, FOOTER) as content:
                metadata = parquet.read_metadata(content)
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            self._starts[shard] = np.cumsum([0, *sizes])
        return self._starts[shard]
