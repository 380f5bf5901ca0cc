"""Layout of the rows of a source: the columns of images, captions and ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..base.faults import BadSample, Fault, reading
from ..text.captions import text_id
from .record import FAULT, image_identity
from .remote import RETRIES, is_inside, joined

PROBED_ROWS = 64
"""Number of rows that are tried when a split is opened."""
NO_ID = "no image id"


class Row(NamedTuple):
    """One row with its image still encoded; `fault` is set if the row is known to be unusable."""

    data: bytes | None
    path: str | None
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

    def encoded_image(self, values: dict[str, Any]) -> tuple[bytes | None, str | None]:
        """Return the encoded image, or the absolute path of its file."""
        image = values[self.image]
        data, path = None, None
        if isinstance(image, str):
            path = image
        elif isinstance(image, (bytes, bytearray)):
            data = bytes(image)
        elif isinstance(image, dict):
            data, path = image.get("bytes"), image.get("path")
        if data is None and path is not None:
            path = joined(self.root, path)
        return data, path

    def texts(self, values: dict[str, Any]) -> list[str]:
        """Return the captions."""
        caption = values[self.caption] if self.caption is not None else None
        if caption is None:
            return []
        return [caption] if isinstance(caption, str) else [text for text in caption if text is not None]

    def row(self, values: dict[str, Any], name: str) -> Row:
        """Return a row; a fault is returned in the row and not raised.

        Args:
            values: values by column, with `FAULT` if the row could not be read.
            name: name of the row in messages.
        """
        try:
            if (cause := values.get(FAULT)) is not None:
                raise BadSample(cause, name)
            with reading(name):
                identity = values[self.image_id] if self.image_id is not None else None
                known = known_identity(identity, name)
                if known is None and self.needs_id:
                    raise BadSample(NO_ID, name)
                return Row(*self.encoded_image(values), self.texts(values), known)
        except BadSample as bad:
            return Row(None, None, [], None, bad.fault)

    def check_inside(self, path: str | None) -> None:
        """Check that a path does not leave the root, by `..` or because it is absolute, if paths are confined to it.

        Raises:
            BadSample: If the path leaves the root; the cause is "outside image_root".
        """
        if self.confined and path is not None and not is_inside(path, self.root):
            raise BadSample("outside image_root", path)


def known_identity(value: Any, name: str) -> int | str | None:
    """Return the id of an image as `image_identity` does.

    Raises:
        BadSample: If the id is not finite; the fault has the name of the row.
    """
    try:
        return image_identity(value)
    except BadSample as bad:
        raise BadSample(bad.fault.cause, name) from None


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


class Ids(NamedTuple):
    """Image ids of a source: integers, the causes of bad rows, and the usable rows without an id."""

    values: np.ndarray  # int64 [N]
    faults: dict[int, str]
    absent: set[int]


def read_ids(column: pa.ChunkedArray, source: int | None, needed: bool) -> Ids:
    """Read a column of ids.

    Args:
        column: the column.
        source: as in `identity_number`.
        needed: whether a row without an id is unusable.
    """
    values, faults, absent = np.zeros(len(column), np.int64), dict[int, str](), set[int]()
    for row, value in enumerate(column):
        try:
            with reading(""):
                known = known_identity(value.as_py(), "")
                if known is not None:
                    values[row] = identity_number(known, source)
                elif needed:
                    raise BadSample(NO_ID, "")
                else:
                    absent.add(row)
        except BadSample as bad:
            faults[row] = bad.fault.cause
    return Ids(values, faults, absent)
