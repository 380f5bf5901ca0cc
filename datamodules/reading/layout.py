"""Form of a row of a source: the records of the readers of files, and the columns of images, captions and ids."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...common.errors import UserError
from ..base.decode import read_image
from ..base.faults import EMPTY_CAPTION, ROW_ERRORS, BadSample, Fault, reading, unreadable
from ..text.captions import is_text, text_id
from .remote import RETRIES, is_inside, is_remote, joined, read_url

PROBED_ROWS = 64
"""Number of rows that are tried when a split is opened."""
FAULT = "vlightning_fault"
"""Column of records with the cause why a row cannot be used; None for usable rows."""
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Type of an encoded image, or of its path."""
RECORD = pa.schema(
    [("image", IMAGE), ("caption", pa.list_(pa.string())), ("image_id", pa.string()), (FAULT, pa.string())]
)
"""Columns of a `Record`."""
_RECORDS_AT_ONCE = 1000
NO_ID = "no image id"
"""Cause of a bad row in a source whose column of ids the user named."""


def probed_rows(length: int) -> list[int]:
    """Return at most `PROBED_ROWS` evenly spaced rows of a table with at least one row."""
    rows: list[int] = np.unique(np.linspace(0, length - 1, PROBED_ROWS).astype(int)).tolist()
    return rows


def check_probes(
    probes: Iterable[Callable[[], Any]], expected: str, split: str, origins: Sequence[str], among: str, advice: str
) -> None:
    """Check that a split has rows, and that at least one of the probed rows can be used.

    Args:
        probes: functions that read a row each; they raise `BadSample`.
        expected: what is expected of the rows, for the message, as is all that follows.
        split: name of the split.
        origins: the sources as the user gave them.
        among: how the probed rows are chosen.
        advice: how to correct the data.

    Raises:
        UserError: If the split is empty, or no probed row can be used.
    """
    sources = ", ".join(map(repr, origins))
    causes: Counter[str] = Counter()
    example = ""
    for probe in probes:
        try:
            probe()
            return
        except BadSample as bad:
            causes[bad.fault.cause] += 1
            example = bad.fault.name if bad.fault.cause != EMPTY_CAPTION else example
    if not causes:
        raise UserError(f"Expected rows in the {split} split ({sources}), got none: check the path.")
    counts = ", ".join(f"{cause}: {count}" for cause, count in causes.items())
    hint = f", for example {example}" if example else ""
    raise UserError(
        f"Expected {expected} in the {split} split ({sources}), got no usable row among {among.format(causes.total())} "
        f"({counts}{hint}): {advice}."
    )


Record = dict[str, Any]
"""`image`: {`bytes`, `path`}; `caption`: list of strings; `image_id`: a string, or None; `FAULT`."""


def record(make: Callable[[], Record]) -> Record:
    """Return the record of one row, or a record with the fault of the row, a `BadSample` or `ROW_ERRORS` of `make`.

    Errors that concern the whole file are raised elsewhere.
    """
    try:
        values = make()
        image_id = values["image_id"]
        path = values["image"]["path"]
        for what, texts in (("caption", values["caption"]), ("path", [path or ""]), ("image id", [image_id or ""])):
            if not all(map(is_text, texts)):
                raise BadSample(f"lone surrogate in the {what}", "")
        return {**values, FAULT: None}
    except BadSample as bad:
        cause = bad.fault.cause
    except ROW_ERRORS as error:
        cause = unreadable(error, "").cause
    return {"image": {"bytes": None, "path": None}, "caption": [], "image_id": None, FAULT: cause}


def record_batches(
    records: Iterable[Record], schema: pa.Schema = RECORD, size: int = _RECORDS_AT_ONCE
) -> Iterator[pa.RecordBatch]:
    """Yield records in batches of a schema, of at most `size` rows."""
    rows = iter(records)
    while chunk := list(itertools.islice(rows, size)):
        yield pa.RecordBatch.from_pylist(chunk, schema=schema)


def file_record(path: str, captions: list[str], image_id: str | None = None) -> Record:
    """Return the record of an image file, without the entry of a fault."""
    return {"image": {"bytes": None, "path": path}, "caption": captions, "image_id": image_id}


def captions_in(value: Any) -> list[str]:
    """Return the value of an entry with captions as a list of texts."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [text if isinstance(text, str) else str(text) for text in value if text is not None]
    return [value if isinstance(value, str) else str(value)]


def identity_in(value: Any) -> str | None:
    """Return the value of an entry with an image id as text, or None if it is no id; raises `BadSample`."""
    identity = image_identity(value, "")
    return None if identity is None else str(identity)


def image_identity(value: Any, name: str) -> int | str | None:
    """Return the id of an image in the form in which ids are compared, or None if the value is no id.

    Integers are equal in any notation (5, 5.0, "5"). All other values are compared as text, so that 1.2 and 1.7 are two
    ids. An empty text is no id.

    Raises:
        BadSample: If the id is not finite.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadSample("image id not finite", name)
        return int(value) if value.is_integer() else repr(value)
    if isinstance(value, (int, str)):
        return value if not isinstance(value, str) or value.strip() else None
    return None if value is None else str(value)


class StoredImage(NamedTuple):
    """An encoded image, or the absolute path or the URL of its file."""

    data: bytes | None
    path: str | None

    def name(self, row: str) -> str:
        """Return the path of the file, or the given name of the row if the row contains the image, for messages."""
        return self.path if self.data is None and self.path else row


class Row(NamedTuple):
    """One row with its image still encoded; `fault` is set if the row cannot be used."""

    image: StoredImage
    captions: list[str]
    image_id: int | str | None
    fault: Fault | None = None


@dataclass(frozen=True)
class Layout:
    """Layout of the rows of one source.

    Args:
        origin: the source as the user gave it, for messages.
        image: image column.
        caption: column of the captions or of the labels; None if there is none.
        image_id: column of the image ids; None if there is none.
        root: folder that relative paths start from.
        classes: names of the labels 0, 1, ..., if the source lists them.
        fault: column with the cause why a row cannot be used; None if there is none.
        confined: whether paths that leave the root are refused.
        needs_id: whether a row without an id is unusable, which is so if the user named the column of ids; otherwise
            the path identifies the image.
        weight: number of times that an epoch of training reads each row.
        retries: number of times that a failed read of an image by URL is tried again.
        rows: the rows of the source that are read, int64 [n]; None for all.
    """

    origin: str
    image: str
    caption: str | None
    image_id: str | None
    root: str
    classes: tuple[str, ...] | None = None
    fault: str | None = None
    confined: bool = False
    needs_id: bool = False
    weight: float = 1.0
    retries: int = RETRIES
    rows: np.ndarray | None = None

    def count(self, dataset: Any) -> int:
        """Return the number of rows that are read of a source."""
        return len(dataset) if self.rows is None else len(self.rows)

    def selected(self, values: Any) -> Any:
        """Return the values of the rows that are read, of an array of NumPy or Arrow with a value for each row."""
        if self.rows is None:
            return values
        return values[self.rows] if isinstance(values, np.ndarray) else values.take(self.rows)

    def encoded_image(self, values: dict[str, Any]) -> StoredImage:
        """Return the encoded image of a row, or the absolute path of its file."""
        image = values[self.image]
        data = None
        path = None
        if isinstance(image, str):
            path = image
        elif isinstance(image, (bytes, bytearray)):
            data = bytes(image)
        elif isinstance(image, dict):
            data = image.get("bytes")
            path = image.get("path")
        if data is None and path is not None:
            path = joined(self.root, path)
        return StoredImage(data, path)

    def read(self, image: StoredImage, row: str) -> bytes:
        """Return the bytes of an image, which are read from its file unless the row contains them.

        Raises:
            BadSample: If there is no image, its path leaves the root, or its file cannot be read.
        """
        if image.data is not None or not image.path:
            return read_image(image.data, None, row)
        self.check_inside(image.path)
        if is_remote(image.path):
            return read_url(image.path, image.path, self.retries)
        return read_image(None, image.path, image.path)

    def texts(self, values: dict[str, Any]) -> list[str]:
        """Return the captions."""
        caption = values[self.caption] if self.caption is not None else None
        if caption is None:
            return []
        return [caption] if isinstance(caption, str) else [text for text in caption if text is not None]

    def row(self, values: dict[str, Any], name: str) -> Row:
        """Return a row of values by column; a fault, also that in the column `FAULT`, is returned in the row."""
        try:
            if (cause := values.get(FAULT)) is not None:
                raise BadSample(cause, name)
            with reading(name):
                identity = image_identity(values[self.image_id] if self.image_id is not None else None, name)
                if identity is None and self.needs_id:
                    raise BadSample(NO_ID, name)
                return Row(self.encoded_image(values), self.texts(values), identity)
        except BadSample as bad:
            return Row(StoredImage(None, None), [], None, bad.fault)

    def check_inside(self, path: str | None) -> None:
        """Check that a path does not leave the root, by `..` or because it is absolute, if paths are confined to it.

        Raises:
            BadSample: If the path leaves the root; the cause is "outside image_root".
        """
        if self.confined and path is not None and not is_inside(path, self.root):
            raise BadSample("outside image_root", path)


def identity_number(identity: int | str, source: int | None) -> int:
    """Return an image's id as an integer: the id itself if it is a 64-bit integer, else a 63-bit hash.

    Args:
        identity: id as stored.
        source: index of the source if several sources are read together, since their ids are unrelated; else None.
    """
    if source is not None:
        return text_id(f"{source}\0{_digits(identity)}")
    if not isinstance(identity, str):
        return int(identity) if -(2**63) <= identity < 2**63 else text_id(_digits(identity))
    number = text_to_integer(identity)
    return text_id(identity) if number is None or str(number) != identity else number


def _digits(identity: int | str) -> str:
    # Python refuses to convert integers of thousands of digits to decimals.
    return hex(identity) if isinstance(identity, int) and identity.bit_length() > 64 else str(identity)


def text_to_integer(text: str) -> int | None:
    """Parse a text of at most 18 digits as an integer; return None for any other text."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


# Arrow types of columns; a value has one of several types by the program that wrote the file.


def is_text_type(kind: pa.DataType) -> bool:
    """Return whether values of a type are texts: `string`, `large_string` or `string_view`, as Polars writes."""
    return _is_one_of(kind, "string", "large_string", "string_view")


def is_binary_type(kind: pa.DataType) -> bool:
    """Return whether values of a type are bytes: `binary`, `large_binary`, `binary_view` or of a fixed size."""
    return _is_one_of(kind, "binary", "large_binary", "binary_view", "fixed_size_binary")


def is_list_type(kind: pa.DataType) -> bool:
    """Return whether values of a type are lists: `list`, `large_list` or of a fixed size."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_one_of(kind: pa.DataType, *names: str) -> bool:
    # By name: pyarrow 15 has no functions for views.
    return str(kind).partition("[")[0] in names
