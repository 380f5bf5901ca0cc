"""Arrow types of columns that hold texts, encoded images or lists, in each layout that Arrow has for them."""

from __future__ import annotations

import pyarrow as pa


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
