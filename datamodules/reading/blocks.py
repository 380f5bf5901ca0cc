"""Lists in blocks of rows that are checked and converted by column, many times as fast as row by row.

A block whose rows all have a usual form (an image that is a text; a caption that is a text, a list of texts or missing;
an id that is a text, a number or missing) is converted as a whole. The rows of any other block are read one by one as
in `lists`, so that rows, their order and the causes of bad rows are the same.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from json.scanner import make_scanner
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..base.faults import ROW_ERRORS, BadSample
from ..base.text_files import ENCODING, parse_integer, require_utf8, with_unique_keys
from .csv_rows import CsvRow, by_column, csv_columns, open_csv
from .layout import IMAGE, RECORD, captions_in, identity_in, record, record_batches
from .lists import has_text, item_with_its_keys, json_line, listed, read_items
from .remote import open_file, suffix_of

BLOCK = 2**22
"""Bytes of a block of JSON, some 30,000 rows of short captions."""
_SPACE = " \t\n\r"
"""What JSON allows between two values."""
_COMMA = re.compile(rf"[{_SPACE}]*,[{_SPACE}]*")
_CLOSING = re.compile(rf"[{_SPACE}]*\][{_SPACE}]*")
_SCALARS = {str, int, float, bool, type(None)}

Items = Iterator[Callable[[], Any]]
Columns = list[list[Any]]
Scanner = Callable[[str, int], tuple[Any, int]]
"""The standard library's parser of the value at a position in a text; it returns the value, and where it ends."""


class Block(NamedTuple):
    """Rows of a file that are read together.

    Attributes:
        columns: returns the values of some columns, None where a row has none; returns None if a row has a fault.
        items: yields the rows as `lists.read_items` does.
    """

    columns: Callable[[Sequence[str]], Columns | None]
    items: Callable[[], Items]


def read_list_batches(
    files: list[str], image: str, caption: str, image_id: str | None, retries: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the records of `lists.read_list` in batches of the schema `RECORD`; arguments and errors are the same."""
    names = (image, caption, "image_id" if image_id is None else image_id)
    for file in files:
        for block in read_blocks(file, retries):
            columns = block.columns(names)
            batch = None if columns is None else _batch(*columns)
            if batch is not None:
                yield batch
                continue
            rows = (record(lambda read=read: listed(read(), image, caption, image_id)) for read in block.items())  # type: ignore[misc]
            yield from record_batches(rows)


def first_keys(file: str) -> list[str]:
    """Return the keys of the first object in a file, so that column names are checked before the file is read."""
    for block in read_blocks(file):
        for read in block.items():
            try:
                item = read()
            except (BadSample, *ROW_ERRORS):
                continue
            if isinstance(item, dict):
                return sorted(key for key in item if isinstance(key, str))
    return []


def read_blocks(path: str, retries: int | None = None) -> Iterator[Block]:
    """Yield the blocks of a file in JSON, JSON lines or CSV, local or by URL.

    Raises:
        UserError: If the file has another form; of a JSON list this is known at the fault, after the blocks before it.
    """
    read = {".json": _array_blocks, ".csv": _csv_blocks}.get(suffix_of(path), _line_blocks)
    with require_utf8(path), open_file(path, retries) as content:
        yield from read(path, content, retries)


# Columns to Arrow


def _batch(images: list[Any], captions: list[Any], ids: list[Any]) -> pa.RecordBatch | None:
    """Return the records of rows by column; None if a row has a fault, or a value of an unusual type."""
    image_kinds = set(map(type, images))
    if image_kinds - (_SCALARS - {type(None)}):
        return None
    try:
        paths = pa.array(images if image_kinds == {str} else list(map(str, images)), pa.string())
        texts = _caption_lists(captions)
        identities = _identities(ids)
    except (BadSample, *ROW_ERRORS):  # such as a lone surrogate, which Arrow refuses
        return None
    if texts is None or identities is None:
        return None
    image = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], fields=list(IMAGE))
    columns = [image, texts, pa.array(identities, pa.string()), pa.nulls(len(paths), pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD)


def _caption_lists(captions: list[Any]) -> pa.ListArray | None:
    """Return the captions of rows as `captions_in` does; None if a value is of an unusual type."""
    kinds = set(map(type, captions))
    if kinds - _SCALARS - {list}:
        return None
    if kinds == {str}:
        return _lists(captions, np.ones(len(captions), np.int32))
    lists = [value if type(value) is list else captions_in(value) for value in captions]
    item_kinds = set(map(type, itertools.chain.from_iterable(lists)))
    if item_kinds - _SCALARS:
        return None
    if item_kinds - {str}:
        lists = list(map(captions_in, lists))
    return _lists(list(itertools.chain.from_iterable(lists)), np.fromiter(map(len, lists), np.int32, len(lists)))


def _lists(texts: list[str], lengths: np.ndarray) -> pa.ListArray:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(texts, pa.string()))


def _identities(ids: list[Any]) -> list[str | None] | None:
    """Return the ids of rows as `identity_in` does; None if a value is of an unusual type; raises `BadSample`."""
    kinds = set(map(type, ids))
    if kinds == {int}:
        return list(map(str, ids))
    if kinds == {str}:
        return [text if text.strip() else None for text in ids]
    return None if kinds - _SCALARS else list(map(identity_in, ids))


# JSON, whose objects are parsed to tuples of pairs, so that a key that occurs twice is seen


def _scanner(parse_int: Callable[[str], Any] | None = None) -> Scanner:
    decoder: Any = json.JSONDecoder(parse_int=parse_int, object_pairs_hook=tuple)
    return make_scanner(decoder)


def _object_columns(rows: list[Any], names: Sequence[str]) -> Columns | None:
    """Return the values of some keys of objects; None if a row is no object, or has a key twice."""
    if set(map(type, rows)) - {tuple}:
        return None
    objects = list(map(dict, rows))
    if sum(map(len, objects)) != sum(map(len, rows)):
        return None
    return [[values.get(name) for values in objects] for name in names]


def _array_blocks(path: str, content: IO[bytes], retries: int | None) -> Iterator[Block]:
    count = 0
    for piece in _array_pieces(content):
        if piece is None:
            # The reader of rows says what the fault is, of the whole file.
            yield Block(lambda names: None, partial(itertools.islice, read_items(path, retries), count, None))
            return
        text, rows = piece
        count += len(rows)
        yield Block(partial(_object_columns, rows), partial(_array_items, text))


def _array_items(text: str) -> Items:
    items = json.loads(text, parse_int=parse_integer, object_pairs_hook=with_unique_keys)
    return (partial(item_with_its_keys, item) for item in items)


def _array_pieces(content: IO[bytes]) -> Iterator[tuple[str, list[Any]] | None]:
    """Yield a list in pieces: each as the text of a list, and its values; at a fault yield None, and stop."""
    decoder = codecs.getincrementaldecoder(ENCODING)()
    scan = _scanner()
    text = decoder.decode(content.read(BLOCK)).lstrip(_SPACE)
    is_open = text.startswith("[")
    text = text[1:].lstrip(_SPACE)
    while is_open:
        try:
            values = _values_in(text, scan)
        except RecursionError:
            break
        except ValueError:  # an integer of more digits than Python parses by itself
            scan = _scanner(parse_integer)
            values = _values_in(text, scan)
        if values.rows:
            yield f"[{text[: values.end]}]", values.rows
        text = text[values.next :]
        if values.is_last:
            text += decoder.decode(content.read(), final=True)
            if text.strip(_SPACE):
                break
            return
        # A value that is longer than the text is parsed again after the text has doubled.
        more = content.read(BLOCK if values.rows else max(BLOCK, len(text)))
        if not more:
            break
        text = (text + decoder.decode(more)).lstrip(_SPACE)
    yield None


class _Values(NamedTuple):
    """Values of a list, where the last of them ends, where the next one starts, and whether there is none."""

    rows: list[Any]
    end: int
    next: int
    is_last: bool


def _values_in(text: str, scan: Scanner) -> _Values:
    """Parse the values in a part of a list that starts with a value, up to one that is cut off or invalid."""
    rows: list[Any] = []
    end = start = 0
    while True:
        try:
            value, stop = scan(text, start)
        except (StopIteration, json.JSONDecodeError):
            return _Values(rows, end, start, False)
        if comma := _COMMA.match(text, stop):
            rows.append(value)
            end = stop
            start = comma.end()
        elif closing := _CLOSING.match(text, stop):
            rows.append(value)
            return _Values(rows, stop, closing.end(), True)
        else:  # perhaps the first digits of a number
            return _Values(rows, end, start, False)


# JSON lines


def _line_blocks(path: str, content: IO[bytes], retries: int | None) -> Iterator[Block]:
    while data := content.read(BLOCK):
        data += content.readline()
        yield Block(partial(_line_columns, data), partial(_line_items, data))


def _line_items(data: bytes) -> Items:
    return (partial(json_line, line) for line in io.BytesIO(data) if has_text(line))


def _line_columns(data: bytes, names: Sequence[str]) -> Columns | None:
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
        lines = [stripped for line in text.split("\n") if (stripped := line.strip(_SPACE))]
        parsed = list(map(_scanner(), lines, itertools.repeat(0)))
    except (ValueError, RecursionError):
        return None
    # The list ends before a line that is no value.
    if [end for _, end in parsed] != list(map(len, lines)):
        return None
    return _object_columns([value for value, _ in parsed], names)


# CSV


def _csv_blocks(path: str, content: IO[bytes], retries: int | None) -> Iterator[Block]:
    header, rows = open_csv(io.TextIOWrapper(content, encoding=ENCODING, newline=""), path)
    while block := rows.block():
        yield Block(partial(csv_columns, header, block), partial(_csv_items, header, block))


def _csv_items(header: list[str], rows: list[CsvRow]) -> Items:
    return (partial(by_column, header, row) for row in rows if row)
