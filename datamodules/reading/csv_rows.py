"""Rows of CSV files, in which an unclosed quotation mark costs its own row only."""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ...common.errors import UserError
from ..base.faults import BadSample

INVALID = "invalid CSV"
UNCLOSED = "unclosed quotation mark"


def read_csv(lines: Iterator[str], path: str) -> Iterator[Callable[[], dict[str | None, Any]]]:
    """Yield a function for each row, which returns the row by column or raises its fault.

    A missing value is None; excess values are under the key None. Blank lines are no rows.

    Args:
        lines: the lines of the file with their line endings, the header first.
        path: the file, for messages.

    Raises:
        UserError: If the header has an unclosed quotation mark, or names a column twice.
    """
    first = next(lines, "")
    rows = _rows(itertools.chain([first], lines), _delimiter(first))
    header = next(rows, [])
    if isinstance(header, str):
        raise UserError(
            f"Expected names of columns in the first line of {path!r}, got {first.strip()[:100]!r} ({header}): correct "
            "the line."
        )
    refuse_duplicates(header, path)
    for row in rows:
        if row:
            yield lambda row=row: _by_column(header, row)  # type: ignore[misc]


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


def _by_column(header: list[str], row: list[str] | str) -> dict[str | None, Any]:
    if isinstance(row, str):
        raise BadSample(row, "")
    values: dict[str | None, Any] = dict.fromkeys(header)
    values |= dict(zip(header, row, strict=False))
    return values if len(row) <= len(header) else values | {None: row[len(header) :]}


def _rows(lines: Iterator[str], delimiter: str) -> Iterator[list[str] | str]:
    """Yield the fields of each row, or why its first line cannot be used; the reader then goes on with the second."""
    returned: deque[str] = deque()
    read: list[str] = []
    columns = 0

    def following() -> Iterator[str]:
        while line := returned.popleft() if returned else next(lines, ""):
            read.append(line)
            yield line
        read.append("")  # the end of the file, which the reader reaches for the next row, or in an open quotation

    while True:
        read.clear()
        row: list[str] | str | None
        try:
            row = next(csv.reader(following(), delimiter=delimiter), None)
        except csv.Error:  # a field is longer than the library allows
            row = INVALID
        if row is None:
            return
        columns = columns or len(row)
        if len(read) > 1 and not (
            isinstance(row, list) and _closed(read, delimiter) and not _swallows(row, delimiter, columns)
        ):
            row = UNCLOSED
            returned.extendleft(line for line in reversed(read[1:]) if line)
        yield row


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
    for place, text in enumerate(row):
        lines = re.split("\r\n|\r|\n", text)
        for number, line in enumerate(lines) if len(lines) > 1 else ():
            fields = line.split(delimiter)
            before = place if number == 0 else 0
            after = len(row) - 1 - place if number == len(lines) - 1 else 0
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
