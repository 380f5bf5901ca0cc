"""Rows in memory: lists of pairs or mappings, columns, data frames, and data sets of `datasets` or torch."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...common.errors import UserError
from .faults import BadSample

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
_OF_A_SOURCE = {"path", "init_args", "class_path"}
_ORIENTATION = 0x0112
_ROWS = (
    "Expected rows as (image, text) pairs, mappings with data.image_column and data.caption_column, a data frame, or a "
    "data set of `datasets` or torch"
)


def in_memory(value: Any) -> bool:
    """Return whether an argument of a datamodule is rows, and not the name of a source or a list of names."""
    if isinstance(value, Mapping):
        return not _OF_A_SOURCE & value.keys()
    if isinstance(value, (list, tuple)):
        return bool(value) and (_is_image(value[0]) or _is_row(value[0]))
    if isinstance(value, (str, bytes, argparse.Namespace)) or not hasattr(value, "__getitem__"):
        return False
    return hasattr(value, "columns") or hasattr(value, "__len__")


def _is_image(value: Any) -> bool:
    return isinstance(value, (Image.Image, np.ndarray, torch.Tensor, bytes))


def _is_row(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not _OF_A_SOURCE & value.keys()
    return isinstance(value, (list, tuple))


class MemoryRows:
    """Rows that a user gives in place of a source.

    Args:
        content: (image, text) or (image, text, image id) pairs, images alone, mappings, a mapping of columns, a data
            frame of pandas or polars, a data set of `datasets`, or one of torch that yields pairs or mappings. An image
            is a path, an image of Pillow, encoded bytes, or an array: uint8 [H, W] or [H, W, 3], or a tensor [3, H, W]
            of uint8 or of floats from 0 to 1. Instead of a text there may be several, or a label.

    Raises:
        UserError: If it has no length, or no rows of such a form.
    """

    weight = 1.0

    def __init__(self, content: Any) -> None:
        self.content = content
        try:
            self.length = len(next(iter(content.values()))) if isinstance(content, Mapping) else len(content)
        except (TypeError, StopIteration):
            raise UserError(f"{_ROWS}, got {type(content).__name__} without a length: give a list.") from None

    @property
    def path(self) -> str:
        """The name of the rows in messages."""
        return f"rows in memory ({type(self.content).__name__})"

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels 0, 1, ..., if the data set lists them, as those of torchvision do."""
        names = getattr(self.content, "classes", None)
        if not isinstance(names, (list, tuple)) or not names:
            return None
        return tuple(names) if all(isinstance(name, str) for name in names) else None

    @property
    def columns(self) -> list[str] | None:
        """Names of the columns; None for pairs and images."""
        first: Any = self.content
        if not isinstance(first, Mapping) and not hasattr(first, "columns"):
            first = self.content[0] if self.length else ()
        names = first if isinstance(first, Mapping) else getattr(first, "columns", None)
        return None if names is None else [str(name) for name in names]

    def rows(self, columns: Sequence[str | None]) -> Iterator[tuple[Any, Any, Any]]:
        """Yield the image, the texts or the label, and the id of each row; None for what it lacks.

        Args:
            columns: names of these three columns.

        Raises:
            UserError: If a row has another form.
        """
        table = self.content
        if isinstance(table, Mapping) or hasattr(table, "columns"):
            names = set(self.columns or ())
            values = [list(table[name]) if name in names else [None] * self.length for name in columns]
            yield from zip(*values, strict=True)
            return
        for number in range(self.length):
            row = table[number]
            if isinstance(row, Mapping):
                yield tuple(None if name is None else row.get(name) for name in columns)  # type: ignore[misc]
            elif isinstance(row, (list, tuple)) and 1 <= len(row) <= 3:
                yield (*row, *[None] * (3 - len(row)))
            elif _is_image(row):
                yield row, None, None
            else:
                raise UserError(f"{_ROWS}, got {type(row).__name__} as row {number}: convert it.")


def stored_image(image: Any) -> dict[str, Any]:
    """Return an image as `bytes` and `path`, one of which is None.

    Raises:
        BadSample: If it is no image.
    """
    if isinstance(image, Mapping):
        return {"bytes": image.get("bytes"), "path": image.get("path")}
    if isinstance(image, (bytes, bytearray)):
        return {"bytes": bytes(image), "path": None}
    if hasattr(image, "__fspath__") or isinstance(image, str):
        return {"bytes": None, "path": str(image)}
    return {"bytes": _encoded(_pillow(image)), "path": None}


def _pillow(image: Any) -> Image.Image:
    """Return an image of Pillow."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, torch.Tensor):
        array = image.detach().cpu().numpy()
        if array.ndim == 3:
            array = array.transpose(1, 2, 0)
    elif isinstance(image, np.ndarray):
        array = image
    else:
        raise BadSample(f"{type(image).__name__} in place of an image", "")
    if np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min(initial=0) < 0 or array.max(initial=0) > 1:
            raise BadSample("pixels outside of 0 to 1", "")
        array = (array * 255).round().astype(np.uint8)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise BadSample(f"array {array.dtype} {list(array.shape)} in place of an image", "")
    return Image.fromarray(array)


def _encoded(image: Image.Image) -> bytes:
    """Return an image as PNG, which keeps its pixels, with its orientation."""
    content = io.BytesIO()
    orientation = image.getexif().get(_ORIENTATION)
    image = image if image.mode in _PNG_MODES else image.convert("RGB")
    exif = Image.Exif()
    if orientation is not None:
        exif[_ORIENTATION] = orientation
    image.save(content, "PNG", compress_level=1, exif=exif)
    return content.getvalue()


def plain_value(value: Any) -> Any:
    """Return a text, a label or an id as plain data; None for NaN, which data frames have for nothing."""
    if isinstance(value, (np.generic, torch.Tensor)) and np.ndim(value) == 0:
        value = value.item()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value = value.tolist()
    return None if isinstance(value, float) and math.isnan(value) else value
