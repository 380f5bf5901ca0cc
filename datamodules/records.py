"""Readers for files that the ``datasets`` library has no fitting builder for, as generators of uniform records.

ALBEF's own JSON mixes strings and lists under one key, which Arrow's JSON reader refuses; the library's WebDataset
builder refuses shards that mix JPEG and PNG; its image-folder builder ends at the first missing file. These generators
feed ``Dataset.from_generator``, so the result is memory-mapped or streamed all the same.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
TEXT_KEYS = ("txt", "text", "caption", "cap")
METADATA = ("metadata.jsonl", "metadata.csv")
ENCODING = "utf-8-sig"
"""Of all text: UTF-8, with or without the mark at its start that programs on Windows write."""

Record = dict[str, Any]
"""``image``: {``bytes``, ``path``}; ``caption``: list of strings; ``image_id``: a string, or None."""


def read_list(files: list[str], image: str, caption: str, image_id: str | None, stamp: list[str]) -> Iterator[Record]:
    """Records of ALBEF's JSON form (a flat list of objects), or of JSON lines.

    Args:
        files: ``.json``, ``.jsonl`` or ``.csv`` files.
        image: key of the picture's path.
        caption: key of the caption, a string or a list of strings.
        image_id: key of the picture's id; None: "image_id" where there is one.
        stamp: makes the library's cache notice changed files; not used.

    Raises:
        ValueError: a file is not of that form.
    """
    for file in files:
        for number, item in enumerate(_items(Path(file))):
            if not isinstance(item, dict) or image not in item:
                keys = sorted(item) if isinstance(item, dict) else type(item).__name__
                raise ValueError(
                    f"found {keys} in item {number} of {file!r}, expected an object with the key {image!r}: "
                    "correct the file or set data.image_column"
                )
            yield {
                "image": {"bytes": None, "path": None if item[image] is None else str(item[image])},
                "caption": _captions(item.get(caption)),
                "image_id": _identity(item.get("image_id" if image_id is None else image_id)),
            }


def first_keys(file: str) -> list[str]:
    """The keys of a file's first item, to check column names before anything is read."""
    for item in _items(Path(file)):
        return sorted(item) if isinstance(item, dict) else []
    return []


@contextlib.contextmanager
def utf8(path: Path) -> Iterator[None]:
    """Say what to do where a file that is read within holds text in another encoding.

    Raises:
        ValueError: it does.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"found no UTF-8 in {str(path)!r} (the byte 0x{error.object[error.start]:02x}), expected it: save the file "
            "as UTF-8 (Excel: CSV UTF-8), or convert it, if it comes from Windows by `iconv -f CP1252 -t UTF-8`"
        ) from error


def _items(path: Path) -> Iterator[Any]:
    with utf8(path):
        yield from _decoded_items(path)


def _decoded_items(path: Path) -> Iterator[Any]:
    ending = path.suffix.lower()
    if ending == ".json":
        items = parsed(path.read_text(encoding=ENCODING), path)
        if not isinstance(items, list):
            raise ValueError(
                f"found a JSON {type(items).__name__} in {str(path)!r}, expected a flat list of objects with a "
                "picture and its caption: convert the file"
            )
        yield from items
        return
    with path.open(encoding=ENCODING, newline="" if ending == ".csv" else None) as file:
        if ending == ".csv":
            delimiter = _delimiter(file.readline())
            file.seek(0)
            yield from csv.DictReader(file, delimiter=delimiter)
        else:
            yield from (parsed(line, path) for line in file if line.strip())


def _delimiter(header: str) -> str:
    """What stands between the columns of a CSV file, by its first line: where numbers have commas, a semicolon does."""
    return max(",;\t", key=header.count)


def parsed(text: str, path: Path) -> Any:
    """What JSON text of a file says.

    Raises:
        ValueError: it is not valid.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"found no valid JSON in {str(path)!r} ({error}), expected it: correct the file") from error


def read_folder(files: list[str], stamp: list[str]) -> Iterator[Record]:
    """Records of pictures without captions."""
    for file in files:
        yield {"image": {"bytes": None, "path": file}, "caption": [], "image_id": None}


def read_class_folders(files: list[str], root: str, stamp: list[str]) -> Iterator[Record]:
    """Records of pictures whose class is the name of the folder, below the root, that they are in.

    Args:
        files: pictures.
        root: the folder with a folder for each class.
        stamp: makes the library's cache notice changed files; not used.

    Raises:
        ValueError: a picture is in no folder of a class.
    """
    for file in files:
        folder, *rest = Path(file).relative_to(root).parts
        if not rest:
            raise ValueError(
                f"found the picture {folder!r} directly in {root!r}, expected a folder for each class with its "
                "pictures: move it, or add metadata.jsonl with a label for each"
            )
        yield {"image": {"bytes": None, "path": file}, "caption": [folder], "image_id": None}


def read_texts(file: str) -> list[str]:
    """The lines of a text file, empty ones included, so that a text's place is its line's.

    Raises:
        ValueError: there is no such file, or no UTF-8 text in it.
    """
    try:
        with open(os.path.expanduser(file), encoding=ENCODING) as lines:
            return [line.rstrip("\n") for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(
            f"found no text file {file!r} ({reason}), expected one in UTF-8 with one text a line: correct the path, or "
            "give a list of texts"
        ) from error


def read_tars(files: list[str], caption: str, image_id: str | None, stamp: list[str]) -> Iterator[Record]:
    """Records of WebDataset shards: neighbouring members with one stem are a sample.

    The picture is the member with a picture's suffix; the captions are the member ``caption`` or ``txt``, or the entry
    ``caption`` of the member ``json``. No other member is read: pickled ones least of all.

    Args:
        files: tar files.
        caption: key of the caption.
        image_id: key of the picture's id in the member ``json``; None: "image_id" where there is one.
        stamp: makes the library's cache notice changed files; not used.

    Raises:
        ValueError: a file is no tar file or ends too early.
    """
    for file in files:
        yield from tar_records(file, caption, image_id)


def tar_records(file: str, caption: str, image_id: str | None, start: int = 0) -> Iterator[Record]:
    """Records of one shard, as :func:`read_tars` makes them, from the byte on at which one of them starts."""
    identity = "image_id" if image_id is None else image_id
    try:
        with open(file, "rb") as content:
            content.seek(start)
            with tarfile.open(fileobj=content) as tar:
                sample: dict[str, Any] = {}
                for first, kind, member in _tar_members(tar, caption):
                    if first and sample:
                        yield _tar_record(sample, caption, identity)
                        sample = {}
                    # Before the next header: a compressed file goes back only by beginning anew.
                    held = tar.extractfile(member)
                    sample[kind] = held.read() if held else b""
                    if kind == "image":
                        sample["path"] = member.name
                if sample:
                    yield _tar_record(sample, caption, identity)
    except tarfile.TarError as error:
        raise ValueError(f"found no readable tar file in {file!r} ({error}), expected a shard: copy it anew") from error


def tar_starts(file: str, caption: str) -> list[int]:
    """The bytes at which the records of a shard start; only headers are read.

    Raises:
        tarfile.TarError: it is compressed, or damaged.
    """
    with tarfile.open(file, "r:") as tar:
        return [member.offset for first, _, member in _tar_members(tar, caption) if first]


def _tar_members(tar: tarfile.TarFile, caption: str) -> Iterator[tuple[bool, str, tarfile.TarInfo]]:
    """The members that records are made of: whether one begins a record, what it is in it, and its header."""
    wanted = {*TEXT_KEYS, caption, "json"}
    current, begun = "", False
    for member in tar:
        folder, _, base = member.name.rpartition("/")
        name, dot, key = base.partition(".")
        if not member.isfile() or not dot or not name:
            continue
        stem = f"{folder}/{name}"
        if stem != current:
            current, begun = stem, False
        key = key.lower()
        picture = f".{key.rpartition('.')[2]}" in IMAGE_SUFFIXES
        if picture or key in wanted:
            yield not begun, "image" if picture else key, member
            begun = True


def _tar_record(sample: dict[str, Any], caption: str, image_id: str) -> Record:
    fields: Any = {}
    if "json" in sample:
        try:
            fields = json.loads(sample["json"])
        except ValueError:  # such a sample has no caption, and is counted for that
            fields = {}
    fields = fields if isinstance(fields, dict) else {}
    captions = _captions(fields.get(caption))
    for key in (caption, *TEXT_KEYS):
        if key in sample and key != "image":
            captions = [sample[key].decode("utf-8", errors="replace")]
            break
    return {
        "image": {"bytes": sample.get("image"), "path": sample.get("path")},
        "caption": captions,
        "image_id": _identity(fields.get(image_id)),
    }


def _captions(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [text if isinstance(text, str) else str(text) for text in value if text is not None]
    return [value if isinstance(value, str) else str(value)]


def _identity(value: Any) -> str | None:
    return None if value is None else str(value)
