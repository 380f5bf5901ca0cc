"""Uniform records, which the readers of files yield for each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..base.faults import ROW_ERRORS, BadSample, unreadable
from ..text.captions import is_text

FAULT = "vlightning_fault"
"""Column of records with the cause why a row cannot be used; None for usable rows."""

Record = dict[str, Any]
"""`image`: {`bytes`, `path`}; `caption`: list of strings; `image_id`: a string, or None; `FAULT`."""


def record(make: Callable[[], Record]) -> Record:
    """Return the record of one row of a file, or a record with the fault of the row.

    Args:
        make: function that creates the record; it may raise `BadSample` or `ROW_ERRORS`, which are caught
            here. Errors that concern the whole file are raised elsewhere.
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


def image_identity(value: Any) -> int | str | None:
    """Return the id of an image in the form in which ids are compared, or None if the value is no id.

    Integers are equal in any notation (5, 5.0, "5"). All other values are compared as text, so that 1.2 and 1.7 are two
    ids. An empty text is no id.

    Raises:
        BadSample: If the id is non-finite.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadSample("image id not finite", "")
        return int(value) if value.is_integer() else repr(value)
    if isinstance(value, (int, str)):
        return value if not isinstance(value, str) or value.strip() else None
    return None if value is None else str(value)


def captions_in(value: Any) -> list[str]:
    """Return the value of an entry with captions as a list of texts."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [text if isinstance(text, str) else str(text) for text in value if text is not None]
    return [value if isinstance(value, str) else str(value)]


def identity_in(value: Any) -> str | None:
    """Return the value of an entry with an image id as text, or None if it is no id.

    Raises:
        BadSample: If the id is non-finite.
    """
    known = image_identity(value)
    return None if known is None else str(known)
