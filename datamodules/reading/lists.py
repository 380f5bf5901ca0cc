"""Readers of lists and image folders, as generators of uniform records.

The readers of the `datasets` library do not suffice: ALBEF's JSON mixes strings and lists under one key, which
Arrow's JSON reader refuses; the WebDataset builder refuses shards that mix JPEG and PNG; the image-folder builder stops
at the first missing file. `Dataset.from_generator` takes the generators, so that records are memory-mapped or
streamed.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from ...common.errors import UserError
from ..base.faults import ROW_ERRORS, BadSample
from ..base.text_files import (
    ENCODING,
    DuplicateKey,
    parse_integer,
    parse_json,
    require_utf8,
    with_unique_keys,
)
from .layout import Record, captions_in, file_record, identity_in, record
from .remote import open_file, suffix_of

_INVALID = "invalid CSV"
_UNCLOSED = "unclosed quotation mark"


def read_list(
    files: list[str], image: str, caption: str, image_id: str | None, retries: int | None = None
) -> Iterator[Record]:
    """Yield the records of files in JSON (a list of objects, as ALBEF's), JSON lines or CSV.

    Args:
        files: `.json`, `.jsonl` or `.csv` files, paths or URLs.
        image: key or column of the image.
        caption: key or column of the caption, a string or a list of strings.
        image_id: key or column of the id of the image; None for "image_id" if that exists.
        retries: as in `attempted`.

    Raises:
        UserError: If a file has another form.
    """
    for file in files:
        for read in read_items(file, retries):
            yield record(lambda read=read: _listed(read(), image, caption, image_id))  # type: ignore[misc]


def _listed(item: Any, image: str, caption: str, image_id: str | None) -> Record:
    values = checked_object(item)
    if values.get(image) is None:
        raise BadSample("no image", "")
    identity = values.get("image_id" if image_id is None else image_id)
    return file_record(str(values[image]), captions_in(values.get(caption)), identity_in(identity))


def checked_object(item: Any) -> dict[str, Any]:
    """Return an item of a list.

    Raises:
        BadSample: If it is no object, or has more values than columns.
    """
    if not isinstance(item, dict):
        raise BadSample("no object", "")
    if None in item:  # the CSV reader's key of excess values, as after a comma in a caption without quotation marks
        raise BadSample("more values than columns", "")
    return item


def first_keys(file: str) -> list[str]:
    """Return the keys of the first object in a file, so that column names are checked before the file is read."""
    for read in read_items(file):
        try:
            item = read()
        except (BadSample, *ROW_ERRORS):
            continue
        if isinstance(item, dict):
            return sorted(key for key in item if isinstance(key, str))
    return []


def read_items(path: str, retries: int | None = None) -> Iterator[Callable[[], Any]]:
    """Yield a function for each item of a file, local or by URL, which returns the item or raises its fault."""
    with require_utf8(path), open_file(path, retries) as content:
        yield from _decoded_items(path, content)


def _decoded_items(path: str, content: IO[bytes]) -> Iterator[Callable[[], Any]]:
    ending = suffix_of(path)
    if ending == ".json":
        items = parse_json(content.read().decode(ENCODING), path, with_unique_keys)
        if not isinstance(items, list):
            raise UserError(
                f"Expected a list of objects with an image and its caption in {path!r}, got a JSON "
                f"{type(items).__name__}: convert the file."
            )
        yield from (lambda item=item: _with_its_keys(item) for item in items)
        return
    if ending == ".csv":
        file = io.TextIOWrapper(content, encoding=ENCODING, newline="")
        yield from read_csv(file, path)
        return
    # Bytes, so that a line that is not UTF-8 is one bad row.
    yield from (lambda line=line: _json_line(line) for line in content if line.strip())


def _json_line(line: bytes) -> Any:
    try:
        item = json.loads(
            line.removeprefix(codecs.BOM_UTF8), parse_int=parse_integer, object_pairs_hook=with_unique_keys
        )
    except UnicodeDecodeError:
        raise BadSample("text that is not UTF-8", "") from None
    except (ValueError, RecursionError):
        raise BadSample("invalid JSON", "") from None
    return _with_its_keys(item)


def _with_its_keys(item: Any) -> Any:
    if isinstance(item, DuplicateKey):
        raise BadSample(f"duplicate key {item.key!r}", "")
    return item


def read_folder(files: list[str]) -> Iterator[Record]:
    """Yield the records of images without captions."""
    for file in files:
        yield record(partial(file_record, file, []))


def read_class_folders(files: list[str], root: str) -> Iterator[Record]:
    """Yield the records of images in one folder per class; the name of the folder is the label.

    Args:
        files: image files.
        root: folder that contains the folders of the classes.

    Raises:
        UserError: If an image is not in the folder of a class.
    """
    for file in files:
        folder, *rest = Path(file).relative_to(root).parts
        if not rest:
            raise UserError(
                f"Expected one folder per class with its images in {root!r}, got the image {folder!r} directly in it: "
                "move the image, or add metadata.jsonl with a label for each image."
            )
        yield record(partial(file_record, file, [folder]))


# CSV, in which an unclosed quotation mark costs its row only


def read_csv(lines: Iterator[str], path: str) -> Iterator[Callable[[], dict[str | None, Any]]]:
    """Yield a function for each row, which returns the row by column or raises its fault.

    A missing value is None; excess values are under the key None. Blank lines are no rows.

    Args:
        lines: the lines of the file with their line endings, the header first.
        path: the file, for messages.

    Raises:
        UserError: If the header has an unclosed quotation mark, or names a column twice.
    """
    first_line = next(lines, "")
    rows = _rows(itertools.chain([first_line], lines), _delimiter(first_line))
    header = next(rows, [])
    if isinstance(header, str):
        raise UserError(
            f"Expected names of columns in the first line of {path!r}, got {first_line.strip()[:100]!r} ({header}): "
            "correct the line."
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
            row = _INVALID
        if row is None:
            return
        columns = columns or len(row)
        if len(read) > 1 and not (
            isinstance(row, list) and _closed(read, delimiter) and not _swallows(row, delimiter, columns)
        ):
            row = _UNCLOSED
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
