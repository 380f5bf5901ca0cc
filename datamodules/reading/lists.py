"""Readers of lists and image folders, as generators of uniform records.

The readers of the `datasets` library do not suffice: ALBEF's JSON mixes strings and lists under one key, which
Arrow's JSON reader refuses; the WebDataset builder refuses shards that mix JPEG and PNG; the image-folder builder stops
at the first missing file. Lists are read in blocks by `blocks`, which leaves blocks with bad rows to these readers.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from ...common.errors import UserError
from ..base.faults import BadSample
from ..base.text_files import (
    ENCODING,
    DuplicateKey,
    parse_integer,
    parse_json,
    require_utf8,
    with_unique_keys,
)
from .csv_rows import read_csv
from .layout import Record, captions_in, file_record, identity_in, record
from .remote import open_file, suffix_of


def read_list(
    files: list[str], image: str, caption: str, image_id: str | None, retries: int | None = None
) -> Iterator[Record]:
    """Yield the records of files in JSON (a list of objects, as ALBEF's), JSON lines or CSV, read row by row.

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
            yield record(lambda read=read: listed(read(), image, caption, image_id))  # type: ignore[misc]


def listed(item: Any, image: str, caption: str, image_id: str | None) -> Record:
    """Return the record of an item, without the entry of a fault; raises `BadSample`. Arguments as in `read_list`."""
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
        yield from (lambda item=item: item_with_its_keys(item) for item in items)
        return
    if ending == ".csv":
        file = io.TextIOWrapper(content, encoding=ENCODING, newline="")
        yield from read_csv(file, path)
        return
    # Bytes, so that a line that is not UTF-8 is one bad row.
    yield from (lambda line=line: json_line(line) for line in content if has_text(line))


def has_text(line: bytes) -> bool:
    """Return whether a line of JSON lines is a row: it has more than white space and a byte order mark."""
    return bool(line.removeprefix(codecs.BOM_UTF8).strip())


def json_line(line: bytes) -> Any:
    """Return the item in a line of JSON lines; raises `BadSample`."""
    try:
        item = json.loads(
            line.removeprefix(codecs.BOM_UTF8), parse_int=parse_integer, object_pairs_hook=with_unique_keys
        )
    except UnicodeDecodeError:
        raise BadSample("text that is not UTF-8", "") from None
    except (ValueError, RecursionError):
        raise BadSample("invalid JSON", "") from None
    return item_with_its_keys(item)


def item_with_its_keys(item: Any) -> Any:
    """Return an item that was parsed with `with_unique_keys`; raises `BadSample` if it has a key twice."""
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
