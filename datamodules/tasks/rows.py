"""Rows of vision-language tasks with a label, decoded on access."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from ..base.decode import decode_image
from ..base.faults import EMPTY_CAPTION, BadSample, Fault
from ..labels.rows import LabelTable
from ..reading.layout import Layout
from ..text.captions import usable_caption
from .annotations import TEXT


class TaskTable(LabelTable):
    """Images with a text and a label, of one or several memory-mapped sources, concatenated.

    Args:
        parts: the opened sources, each with its layout.
        max_pixels: images with more pixels are refused.
        image_columns: columns of the images of a row.
    """

    def __init__(self, parts: Sequence[tuple[Any, Layout]], max_pixels: int, image_columns: Sequence[str]) -> None:
        super().__init__(parts, max_pixels)
        self.image_columns = tuple(image_columns)
        self._images = [dataset for dataset, _ in parts]  # with all columns
        self._texts = [None] * len(parts)

    def all_images(self, row: int) -> list[Image.Image]:
        """Return the decoded images of a row; raises `BadSample`."""
        layout = self.layouts[self._locate(row)[0]]
        images = []
        for column in self.image_columns:
            data, path = layout.encoded_image({layout.image: self._value(row, column)})
            if data is None:
                layout.check_inside(path)
            images.append(decode_image(data, path, path or self.name(row), self.max_pixels))
        return images

    def all_image_names(self, row: int) -> list[str]:
        """Return the absolute path of each image, or the name of the row if the data contains the image."""
        layout = self.layouts[self._locate(row)[0]]
        found = [layout.encoded_image({layout.image: self._value(row, column)}) for column in self.image_columns]
        return [path if data is None and path else self.name(row) for data, path in found]

    def text(self, row: int) -> str:
        """Return the raw text of a row; raises `BadSample`."""
        return str(self._value(row, TEXT))

    def target(self, row: int) -> Any:
        """Return the class index of a row, or None if the split has no labels; raises `BadSample`."""
        return self.label(row)

    def texts(self) -> Iterator[str]:
        """Yield the texts of rows without a fault, to train a tokenizer on."""
        for row in range(len(self)):
            with contextlib.suppress(BadSample):
                yield self.text(row)

    def check_texts(self, split: str, clean: bool, max_words: int) -> None:
        """Check that the split has rows, and that at least one of the probed rows can be used.

        Raises:
            UserError: If the split is empty, or no probed row can be used.
        """

        def unusable(row: int) -> Fault | None:
            try:
                if not usable_caption(self.text(row), clean, max_words):
                    return Fault(EMPTY_CAPTION, self.name(row))
                self.all_images(row)
            except BadSample as bad:
                return bad.fault
            return None

        self.check_rows(split, "images with a text", "check data.image_root and the column names", unusable)
