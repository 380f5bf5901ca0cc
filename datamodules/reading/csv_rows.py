"""Rows of CSV files, in which an unclosed quotation mark costs its row only."""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...common.errors import UserError
from ..base.faults import BadSample

LINES = 50_000
"""Lines of a block."""
_INVALID = "invalid CSV"
_UNCLOSED = "unclosed quotation mark"

CsvRow = list[str] | str
"""The fields of a row, empty for a blank line; or why a line cannot be used."""


def read_csv(lines: Iterator[str], path: str) -> Iterator[Callable[[], dict[str | None, Any]]]:
    """Yield a function for each row, which returns the row by column or raises its fault.

    A missing value is None; excess values are under the key None. Blank lines are no rows.

    Args:
        lines: the lines of the file with their line endings, the header first.
        path: the file, for messages.

    Raises:
        UserError: If the header has an unclosed quotation mark, or names a column twice.
    """
    header, rows = open_csv(lines, path)
    for row in rows:
        if row:
            yield lambda row=row: by_column(header, row)  # type: ignore[misc]


def open_csv(lines: Iterator[str], path: str) -> tuple[list[str], CsvRows]:
    """Return the header of a file and the rows after it; arguments and errors as in `read_csv`."""
    first_line = next(lines, "")
    rows = CsvRows(itertools.chain([first_line], lines), _delimiter(first_line))
    header = next(rows, [])
    if isinstance(header, str):
        raise UserError(
            f"Expected names of columns in the first line of {path!r}, got {first_line.strip()[:100]!r} ({header}): "
            "correct the line."
        )
    refuse_duplicates(header, path)
    return header, rows


def refuse_duplicates(names: list[str], path: str) -> None:
    """Refuse a file that names a column twice, since only one of both would be read; empty names are ignored.

    Raises:
        UserError: If a name is not unique.
    """
    double = next((name for name in names if name and names.count(name) > 1), None)
    if double is not None:
        raise UserError(
            f"Expected different names of columns in {path!r}, got {double!r} {names.count(double)} times: rename or "
            "remove one of these columns."
        )


def _delimiter(header: str) -> str:
    """Return the most frequent of comma, semicolon and tab in the first line of a CSV file.

    Spreadsheets write semicolons in locales with decimal commas.
    """
    return max(",;\t", key=header.count)


def by_column(header: list[str], row: CsvRow) -> dict[str | None, Any]:
    """Return the values of a row by column, as `read_csv` gives them; raises `BadSample`."""
    if isinstance(row, str):
        raise BadSample(row, "")
    values: dict[str | None, Any] = dict.fromkeys(header)
    values |= dict(zip(header, row, strict=False))
    return values if len(row) <= len(header) else values | {None: row[len(header) :]}


def csv_columns(header: list[str], rows: list[CsvRow], names: Sequence[str]) -> list[list[Any]] | None:
    """Return the values of some columns, None where a row has none; None if a row has a fault or excess values."""
    fields = [row for row in rows if row]
    kinds = set(map(type, fields))
    lengths = set(map(len, fields))
    if kinds - {list} or max(lengths, default=0) > len(header):
        return None
    columns: list[list[Any]] = []
    for name in names:
        if header.count(name) > 1:  # columns without a name
            return None
        position = header.index(name) if name in header else len(header)
        if lengths == {len(header)} and name in header:
            columns.append([row[position] for row in fields])
        else:
            columns.append([row[position] if position < len(row) else None for row in fields])
    return columns


class CsvRows:
    """The rows of the lines of a file, one by one or in blocks; lines that have been read ahead are `waiting`.

    Args:
        lines: the lines with their line endings.
        delimiter: character between two fields.
    """

    def __init__(self, lines: Iterator[str], delimiter: str) -> None:
        self.lines = lines
        self.delimiter = delimiter
        self.columns = 0
        self.waiting: deque[str] = deque()

    def __iter__(self) -> Iterator[CsvRow]:
        return self

    def __next__(self) -> CsvRow:
        """Return the fields of a row, or why its first line cannot be used; the next row is then the second line."""
        read: list[str] = []
        row: CsvRow | None
        try:
            row = next(csv.reader(self._following(read), delimiter=self.delimiter), None)
        except csv.Error:  # a field is longer than the library allows
            row = _INVALID
        if row is None:
            raise StopIteration
        self.columns = self.columns or len(row)
        if len(read) > 1 and not (isinstance(row, list) and self._is_one_row(read, row)):
            row = _UNCLOSED
            self.waiting.extendleft(line for line in reversed(read[1:]) if line)
        return row

    def _following(self, read: list[str]) -> Iterator[str]:
        while line := self.waiting.popleft() if self.waiting else next(self.lines, ""):
            read.append(line)
            yield line
        read.append("")  # the end of the file, which the reader reaches for the next row, or in an open quotation

    def block(self) -> list[CsvRow]:
        """Return the rows of the next `LINES` lines or so; none at the end of the file."""
        self.waiting.extend(itertools.islice(self.lines, max(LINES - len(self.waiting), 0)))
        rows = self._whole_rows(list(self.waiting))
        if not rows:
            # A fault: the rows of these lines one by one.
            while self.waiting:
                rows.append(next(self))
        return rows

    def _whole_rows(self, lines: list[str]) -> list[CsvRow]:
        """Take from the waiting lines those of complete rows, and return these; none if a row has a fault."""
        rows: list[CsvRow] = []
        if not self.columns:
            return rows
        used = 0
        # The line after them shows whether the last row is complete.
        reader = csv.reader(itertools.chain(lines, ["\n"]), delimiter=self.delimiter)
        try:
            for row in reader:
                if (end := reader.line_num) > len(lines):
                    break
                if end - used > 1 and not self._is_one_row(lines[used:end], row):
                    return []
                rows.append(row)
                used = end
        except csv.Error:
            return []
        self.waiting = deque(lines[used:])
        return rows

    def _is_one_row(self, lines: list[str], row: list[str]) -> bool:
        """Return whether a row of several lines is one, and contains no further rows."""
        return _closed(lines, self.delimiter) and not _swallows(row, self.delimiter, self.columns)


def _closed(read: list[str], delimiter: str) -> bool:
    """Return whether quotation marks in lines of one row open and close whole fields."""
    try:
        list(csv.reader(read, delimiter=delimiter, strict=True))
    except csv.Error:
        return False
    return True


def _swallows(row: list[str], delimiter: str, columns: int) -> bool:
    """Return whether a row of several lines contains further rows.

    An opening quotation mark that is never closed, as in `"5 inch`, may end at a mark that is meant as text, as in
    `a screen of 20"`. The lines between them look like rows: all columns, and a path or URL of the same kind in the
    same column. Lines of a caption may have as many delimiters, but no such path.
    """
    for column, text in enumerate(row):
        lines = re.split("\r\n|\r|\n", text)
        for number, line in enumerate(lines) if len(lines) > 1 else ():
            fields = line.split(delimiter)
            before = column if number == 0 else 0
            after = len(row) - 1 - column if number == len(lines) - 1 else 0
            if before + len(fields) + after == columns == len(row):
                pairs = zip(fields, row[before:], strict=False)
                kinds = ((_kind_of_path(field), _kind_of_path(other)) for field, other in pairs if other is not text)
                if any(kind is not None and kind == other for kind, other in kinds):
                    return True
    return False


def _kind_of_path(text: str) -> str | None:
    """Return the scheme of a URL or the suffix of a path; None for other texts."""
    scheme, separator, _ = text.partition("://")
    return scheme if separator else os.path.splitext(text)[1].lower() or None
