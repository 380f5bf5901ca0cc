"""The rows of a data set as they are embedded, read in loader workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ...datamodules.base.decode import decode_image
from ...datamodules.base.faults import BadSample
from ...datamodules.base.samples import SeededSet
from ...datamodules.base.sampling import sample_numbers, seeded
from ...datamodules.reading.table import PairTable
from ...datamodules.stores.identity import row_key
from ...datamodules.text.captions import usable_caption


class EmbeddedRow(NamedTuple):
    """A row before its features are computed.

    Attributes:
        row: index of the row.
        name: path of the image, or source and row.
        image_id: equal for rows of the same image; None if it has none.
        key: `row_key`; None without an image.
        views: the views, [K, 3, S, S]; None if images are not embedded, or the row has a fault.
        captions: captions that are not blank.
        fault: why the row cannot be used.
    """

    row: int
    name: str
    image_id: int | None
    key: int | None
    views: Tensor | None
    captions: list[str]
    fault: str | None


@dataclass(eq=False)
class EmbeddedSet(SeededSet):
    """Rows with views of their images; the views are those that training draws in its first K epochs.

    Args:
        table: the rows.
        transform: image to [3, S, S]; None if images are not embedded.
        views: number K of augmented views; 0 for one view without augmentation.
        seed: seed of the augmentation.
        texts: whether captions are embedded.
    """

    table: PairTable
    transform: Callable[[Image.Image], Tensor] | None
    views: int
    seed: int
    texts: bool

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> Any:
        table = self.table
        name = table.name(row)
        key, views, fault, image_id = None, None, None, None
        captions: list[str] = []
        try:
            captions = [text for text in table.captions(row) if usable_caption(text, False, 0)] if self.texts else []
            name, image_id, key = table.image_name(row), table.image_id(row), key_of(table, row)
            if self.transform is not None:
                views = self._views(table, row)
        except BadSample as bad:
            fault = bad.fault.cause
        return EmbeddedRow(row, name, image_id, key, views, captions, fault)

    def _views(self, table: PairTable, row: int) -> Tensor:
        assert self.transform is not None
        encoded = table.encoded(row)
        image = decode_image(encoded, None, table.image_name(row), table.max_pixels)
        pixels = []
        for view in range(max(self.views, 1)):
            with seeded(sample_numbers(self.seed, view, row)[0]):
                pixels.append(self.transform(image))
        return torch.stack(pixels)


def key_of(table: PairTable, row: int) -> int | None:
    """Return the `row_key` of a row; raises `BadSample`."""
    image = table.stored_image(row)
    return row_key(image.path, image.data)


def as_list(rows: Sequence[Any]) -> Any:
    """Collate rows to a list; their images are stacked on the device."""
    return list(rows)
