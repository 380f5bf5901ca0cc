"""Samples and batches of image classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from PIL import Image

from ..base.faults import BadSample, Collated, Outcome
from ..base.samples import Rows, Transform, empty_images, stacked, usable_samples
from ..base.sampling import seeded, view_seed


class LabeledRows(Rows, Protocol):
    """Rows of images with one class each."""

    def label(self, row: int) -> int | None:
        """Return the class index, or None if the split has no labels; raises `BadSample`."""


def readable_label(rows: LabeledRows, row: int) -> int | None:
    """Return the class index of a row; None if it has no readable label."""
    try:
        return rows.label(row)
    except BadSample:
        return None


class LabeledSample(NamedTuple):
    """Views of one usable image, and its class index."""

    images: tuple[torch.Tensor, ...]
    label: int | None
    sample_index: int


@dataclass
class LabelReader:
    """Reader of training samples: independently augmented views of an image, and its class index.

    Args:
        rows: rows of the split.
        transform: image to float [3, H, W].
        views: number of views; with 0 views the image is not decoded.
    """

    rows: LabeledRows
    transform: Transform
    views: int

    def __call__(self, row: int, numbers: tuple[int, int]) -> LabeledSample:
        """Read a row.

        Args:
            row: index of the row.
            numbers: random numbers of the row, from `sample_numbers`.

        Raises:
            BadSample: If the row cannot be used.
        """
        images = []
        image = self.rows.image(row) if self.views else None
        for view in range(self.views):
            with seeded(view_seed(numbers[0], view)):
                images.append(self.transform(_copied(image)))
        return LabeledSample(tuple(images), self.rows.label(row), row)


def _copied(image: Image.Image | None) -> Image.Image:
    # A transform may modify the image in place.
    assert image is not None
    return image.copy()


@dataclass
class LabelCollate:
    """Build batches: `sample_index` [B], `label` [B] if the split has labels, and [B, 3, H, W] for each view.

    Args:
        views: names of the views.
        transform: determines the image size of an empty batch; None in training, where a missing sample ends the run.
    """

    views: Sequence[str]
    transform: Transform | None = None

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the views."""
        samples, num_read, faults = usable_samples(outcomes)
        if self.transform is None and len(samples) < len(outcomes):
            return Collated(None, num_read, faults)  # no usable substitute was found: the loader ends the run
        batch = {name: stacked([s.images[view] for s in samples]) for view, name in enumerate(self.views) if samples}
        if self.transform is not None and not samples:
            batch = {name: empty_images(self.transform) for name in self.views}
        if all(sample.label is not None for sample in samples):
            batch["label"] = torch.tensor([sample.label for sample in samples], dtype=torch.long)
        batch["sample_index"] = torch.tensor([sample.sample_index for sample in samples], dtype=torch.long)
        return Collated(batch, num_read, faults)
