"""Readers of lists and image folders, as generators of uniform records.

The readers of the `datasets` library do not suffice: ALBEF's JSON mixes strings and lists under one key, which
Arrow's JSON reader refuses; the WebDataset builder refuses shards that mix JPEG and PNG; the image-folder builder stops
at the first missing file. `Dataset.from_generator` takes the generators, so that records are memory-mapped or
streamed.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Iterator
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
from .csv_rows import read_csv
from .record import Record, captions_in, identity_in, record
from .remote import open_file, suffix_of


def read_list(
    files: list[str], image: str, caption: str, image_id: str | None, stamp: list[str], retries: int | None = None
) -> Iterator[Record]:
    """Yield the records of files in JSON (a list of objects, as ALBEF's), JSON lines or CSV.

    Args:
        files: `.json`, `.jsonl` or `.csv` files, paths or URLs.
        image: key of the path of the image.
        caption: key of the caption, a string or a list of strings.
        image_id: key of the id of the image; None for "image_id" if that exists.
        stamp: not read; a change of it, with the files, invalidates the cache of the `datasets` library.
        retries: as in `attempted`.

    Raises:
        UserError: If a file has another form.
    """
    for file in files:
        for read in read_items(file, retries):
            yield record(lambda read=read: _listed(read(), image, caption, image_id))  # type: ignore[misc]


def _listed(item: Any, image: str, caption: str, image_id: str | None) -> Record:
    if not isinstance(item, dict):
        raise BadSample("no object", "")
    if None in item:  # the CSV reader's key of excess values, as after a comma in a caption without quotation marks
        raise BadSample("more values than columns", "")
    if item.get(image) is None:
        raise BadSample("no image", "")
    identity = item.get("image_id" if image_id is None else image_id)
    return {
        "image": {"bytes": None, "path": str(item[image])},
        "caption": captions_in(item.get(caption)),
        "image_id": identity_in(identity),
    }


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
    """Yield a function for each item of a file, which returns the item or raises the fault of the item.

    Args:
        path: path or URL.
        retries: as in `attempted`.
    """
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


def read_folder(files: list[str], stamp: list[str]) -> Iterator[Record]:
    """Yield the records of images without captions."""
    for file in files:
        yield record(lambda file=file: _image(file, []))  # type: ignore[misc]


def _image(file: str, captions: list[str]) -> Record:
    return {"image": {"bytes": None, "path": file}, "caption": captions, "image_id": None}


def read_class_folders(files: list[str], root: str, stamp: list[str]) -> Iterator[Record]:
    """Yield the records of images in one folder per class; the name of the folder is the label.

    Args:
        files: image files.
        root: folder that contains the folders of the classes.
        stamp: not read; a change of it, with the files, invalidates the cache of the `datasets` library.

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
        yield record(lambda file=file, folder=folder: _image(file, [folder]))  # type: ignore[misc]
