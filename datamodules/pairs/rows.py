"""Rows of pairs, one for each caption of an image."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from PIL import Image

from ..base.faults import EMPTY_CAPTION, BadSample
from ..base.mixing import Mix
from ..reading.table import PairTable

Table = TypeVar("Table", bound=PairTable)


class CaptionRows(Generic[Table]):
    """Captions of images in random access, one per row.

    An image without readable captions has one row, so that it is counted as a bad row.
    """

    def __init__(self, images: Table) -> None:
        self.table = images
        self._ends = np.cumsum(images.caption_counts())

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @cached_property
    def mix(self) -> Mix:
        """Number of captions and weight of each source."""
        ends = np.cumsum(self.table.mix.sizes)
        starts = np.concatenate([[0], self._ends])
        return Mix(np.diff(starts[np.concatenate([[0], ends])]).tolist(), self.table.mix.weights)

    def image_row(self, row: int) -> int:
        """Return the row of the image of a caption."""
        return int(np.searchsorted(self._ends, row, side="right"))

    def caption(self, row: int) -> str:
        """Return the raw caption.

        Raises:
            BadSample: If the captions of the image cannot be read, or there is none.
        """
        image = self.image_row(row)
        captions = self.table.captions(image)
        number = row - int(self._ends[image - 1] if image else 0)
        if number >= len(captions):  # the image has no captions, or an empty entry in their list
            raise BadSample(EMPTY_CAPTION, self.table.name(image))
        return captions[number]

    def captions(self, row: int) -> list[str]:
        """Return the caption in a list; raises `BadSample`."""
        return [self.caption(row)]

    def image(self, row: int) -> Image.Image:
        """Return the decoded image.

        Raises:
            BadSample: If the image cannot be used, for example because its file is missing.
        """
        return self.table.image(self.image_row(row))

    def image_id(self, row: int) -> int:
        """Return a number that is equal for captions of the same image; raises `BadSample`."""
        return self.table.image_id(self.image_row(row))

    def name(self, row: int) -> str:
        """Return the name of the row of the image in messages."""
        return self.table.name(self.image_row(row))

    def image_name(self, row: int) -> str:
        """Return the path of an image file, or source and row of an image that is stored in the data."""
        return self.table.image_name(self.image_row(row))

    def images(self) -> list[list[int]]:
        """Return the rows of the captions of each image, in the order of the first rows."""
        if len(self) == len(self.table):
            return self.table.images()
        starts = np.concatenate([[0], self._ends]).tolist()
        return [
            [row for image in images for row in range(starts[image], starts[image + 1])]
            for images in self.table.images()
        ]

    def texts(self) -> Iterator[str]:
        """Yield all captions of rows without a fault."""
        return self.table.texts()
