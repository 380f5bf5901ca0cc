"""Readers for files that the ``datasets`` library has no fitting builder for, as generators of uniform records.

ALBEF's own JSON mixes strings and lists under one key, which Arrow's JSON reader refuses; the library's WebDataset
builder refuses shards that mix JPEG and PNG; its image-folder builder ends at the first missing file. These generators
feed ``Dataset.from_generator``, so the result is memory-mapped or streamed all the same.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import json
import lzma
import math
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..core.decode import MAX_BYTES, ROW_ERRORS, BadSample, unreadable
from ..text.tokenizers import is_text

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
TEXT_KEYS = ("txt", "text", "caption", "cap")
METADATA = ("metadata.jsonl", "metadata.csv")
ENCODING = "utf-8-sig"
"""Of all text: UTF-8, with or without the mark at its start that programs on Windows write."""
FAULT = "vlightning_fault"
"""The column of records that says why a row cannot be used, None where it can."""
TAR_ERRORS = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError)
"""What a damaged tar file raises, compressed ones and numbers in extended headers included."""

Record = dict[str, Any]
"""``image``: {``bytes``, ``path``}; ``caption``: list of strings; ``image_id``: a string, or None; :data:`FAULT`."""


def record(make: Callable[[], Record]) -> Record:
    """What ``make`` makes of one row of a file; a record of its fault where the row's content does not allow it.

    The one place where a reader of files meets what is wrong with a single row. It may raise :class:`BadSample` or
    :data:`ROW_ERRORS` for that; what is wrong with the whole file is raised outside.
    """
    try:
        made = make()
        image_id, path = made["image_id"], made["image"]["path"]
        for what, texts in (("caption", made["caption"]), ("path", [path or ""]), ("image id", [image_id or ""])):
            if not all(map(is_text, texts)):
                raise BadSample(f"lone surrogate in the {what}", "")
        return {**made, FAULT: None}
    except BadSample as bad:
        cause = bad.fault.cause
    except ROW_ERRORS as error:
        cause = unreadable(error, "").cause
    return {"image": {"bytes": None, "path": None}, "caption": [], "image_id": None, FAULT: cause}


def read_list(files: list[str], image: str, caption: str, image_id: str | None, stamp: list[str]) -> Iterator[Record]:
    """Records of ALBEF's JSON form (a flat list of objects), or of JSON lines.

    Args:
        files: ``.json``, ``.jsonl`` or ``.csv`` files.
        image: key of the image's path.
        caption: key of the caption, a string or a list of strings.
        image_id: key of the image's id; None: "image_id" where there is one.
        stamp: makes the library's cache notice changed files; not used.

    Raises:
        ValueError: a file is not of that form.
    """
    for file in files:
        for read in _items(Path(file)):
            yield record(lambda read=read: _listed(read(), image, caption, image_id))  # type: ignore[misc]


def _listed(item: Any, image: str, caption: str, image_id: str | None) -> Record:
    if not isinstance(item, dict):
        raise BadSample("no object", "")
    if None in item:  # where the CSV reader puts them: a comma in a caption without quotation marks cuts it
        raise BadSample("more values than columns", "")
    if item.get(image) is None:
        raise BadSample("no image", "")
    identity = item.get("image_id" if image_id is None else image_id)
    return {
        "image": {"bytes": None, "path": str(item[image])},
        "caption": _captions(item.get(caption)),
        "image_id": _identity(identity),
    }


def first_keys(file: str) -> list[str]:
    """The keys of a file's first item that is an object, to check column names before anything is read."""
    for read in _items(Path(file)):
        try:
            item = read()
        except (BadSample, *ROW_ERRORS):
            continue
        if isinstance(item, dict):
            return sorted(key for key in item if isinstance(key, str))
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


def _items(path: Path) -> Iterator[Callable[[], Any]]:
    """The items of a file, each as a function that returns it, or raises what is wrong with it alone."""
    with utf8(path):
        yield from _decoded_items(path)


def _decoded_items(path: Path) -> Iterator[Callable[[], Any]]:
    ending = path.suffix.lower()
    if ending == ".json":
        items = parsed(path.read_text(encoding=ENCODING), path)
        if not isinstance(items, list):
            raise ValueError(
                f"found a JSON {type(items).__name__} in {str(path)!r}, expected a flat list of objects with a "
                "image and its caption: convert the file"
            )
        yield from (lambda item=item: item for item in items)
        return
    if ending == ".csv":
        with path.open(encoding=ENCODING, newline="") as file:
            delimiter = _delimiter(file.readline())
            file.seek(0)
            rows = csv.DictReader(file, delimiter=delimiter)
            while (read := _next_row(rows)) is not None:
                yield read
        return
    with path.open("rb") as lines:  # bytes, so that a line which is not UTF-8 is one bad row
        yield from (lambda line=line: _json_line(line) for line in lines if line.strip())


def _next_row(rows: Iterator[Any]) -> Callable[[], Any] | None:
    """The next row, or what raises its error: one that is longer than the library allows."""
    try:
        row = next(rows)
    except StopIteration:
        return None
    except csv.Error:
        return _too_long
    return lambda: row


def _too_long() -> Any:
    raise BadSample("invalid CSV", "")


def _json_line(line: bytes) -> Any:
    try:
        return json.loads(line.removeprefix(codecs.BOM_UTF8), parse_int=_whole)
    except UnicodeDecodeError:
        raise BadSample("text that is not UTF-8", "") from None
    except (ValueError, RecursionError):
        raise BadSample("invalid JSON", "") from None


def _whole(digits: str) -> int | str:
    # Python refuses to read more digits, and would refuse the whole file for those of one image's id.
    return int(digits) if len(digits) < 4300 else digits


def _delimiter(header: str) -> str:
    """What stands between the columns of a CSV file, by its first line: where numbers have commas, a semicolon does."""
    return max(",;\t", key=header.count)


def parsed(text: str, path: Path) -> Any:
    """What JSON text of a file says; whole numbers of thousands of digits stay text.

    Raises:
        ValueError: it is not valid, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"found no valid JSON in {str(path)!r} ({error}), expected it: correct the file") from error


def read_folder(files: list[str], stamp: list[str]) -> Iterator[Record]:
    """Records of images without captions."""
    for file in files:
        yield record(lambda file=file: _image(file, []))  # type: ignore[misc]


def _image(file: str, captions: list[str]) -> Record:
    return {"image": {"bytes": None, "path": file}, "caption": captions, "image_id": None}


def read_class_folders(files: list[str], root: str, stamp: list[str]) -> Iterator[Record]:
    """Records of images whose class is the name of the folder, below the root, that they are in.

    Args:
        files: images.
        root: the folder with a folder for each class.
        stamp: makes the library's cache notice changed files; not used.

    Raises:
        ValueError: an image is in no folder of a class.
    """
    for file in files:
        folder, *rest = Path(file).relative_to(root).parts
        if not rest:
            raise ValueError(
                f"found the image {folder!r} directly in {root!r}, expected a folder for each class with its "
                "images: move it, or add metadata.jsonl with a label for each"
            )
        yield record(lambda file=file, folder=folder: _image(file, [folder]))  # type: ignore[misc]


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

    The image is the member with an image's suffix; the captions are the member ``caption`` or ``txt``, or the entry
    ``caption`` of the member ``json``. No other member is read: pickled ones least of all.

    Args:
        files: tar files.
        caption: key of the caption.
        image_id: key of the image's id in the member ``json``; None: "image_id" where there is one.
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
                    if member.size > MAX_BYTES:  # a sparse member is small in the file whatever it says
                        sample["too large"] = b""
                        continue
                    # Before the next header: a compressed file goes back only by beginning anew.
                    held = tar.extractfile(member)
                    sample[kind] = held.read() if held else b""
                    if kind == "image":
                        # The name need not be UTF-8, and is only shown.
                        sample["path"] = os.fsencode(member.name).decode("utf-8", errors="replace")
                if sample:
                    yield _tar_record(sample, caption, identity)
    except TAR_ERRORS as error:
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
        image = f".{key.rpartition('.')[2]}" in IMAGE_SUFFIXES
        if image or key in wanted:
            yield not begun, "image" if image else key, member
            begun = True


def _tar_record(sample: dict[str, Any], caption: str, image_id: str) -> Record:
    return record(lambda: _of_members(sample, caption, image_id))


def _of_members(sample: dict[str, Any], caption: str, image_id: str) -> Record:
    if "too large" in sample:
        raise BadSample("too large", "")
    fields: Any = {}
    if "json" in sample:
        try:
            fields = json.loads(sample["json"], parse_int=_whole)
        except (ValueError, RecursionError):  # such a sample has no caption, and is counted for that
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
    known = image_identity(value)
    return None if known is None else str(known)


def image_identity(value: Any) -> int | str | None:
    """An image's id as it is compared, None where there is none.

    A whole number is the same number however it is written (5, 5.0, "5"). Everything else is compared as text, so 1.2
    and 1.7 are two images. An empty text is none.

    Raises:
        BadSample: it is NaN or infinite.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadSample("image id not finite", "")
        return int(value) if value.is_integer() else repr(value)
    if isinstance(value, (int, str)):
        return value if not isinstance(value, str) or value.strip() else None
    return None if value is None else str(value)


def whole_number(text: str) -> int | None:
    """The number that a text of at most 18 digits is, None where it is something else."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
