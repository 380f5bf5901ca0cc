"""Samples and batches of image classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..base.faults import BadSample, Collated, Outcome
from ..base.samples import Rows, Transform, empty_images, stacked, usable_samples
from ..base.sampling import seeded, view_seed


class LabeledRows(Rows, Protocol):
    """Rows of images with one class each."""

    def label(self, row: int) -> int | None:
        """Return the class index, or None if the split has no labels; raises `BadSample`."""


def labels_of(rows: LabeledRows) -> list[int]:
    """Return the class index of each row; -1 for a row without a readable label."""
    labels: list[int] = []
    for row in range(len(rows)):
        try:
            label = rows.label(row)
        except BadSample:
            label = None
        labels.append(-1 if label is None else label)
    return labels


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
        """Read a row; arguments and errors as in `Reader`."""
        images = []
        if self.views:
            image = self.rows.image(row)
            for view in range(self.views):
                with seeded(view_seed(numbers[0], view)):
                    images.append(self.transform(image.copy()))  # a transform may modify the image in place
        return LabeledSample(tuple(images), self.rows.label(row), row)


@dataclass
class LabelCollate:
    """Build batches: `sample_index` [B], `label` [B] if the split has labels, and [B, 3, H, W] for each view.

    Args:
        views: names of the views, or of the images of a sample.
        transform: determines the image size of an empty batch; None in training, where a missing sample ends the run.
    """

    views: Sequence[str]
    transform: Transform | None = None

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        if self.transform is None and len(samples) < len(outcomes):
            return Collated(None, num_read, faults)  # no usable substitute was found: the loader ends the run
        batch: dict[str, Any] = {}
        for view, name in enumerate(self.views):
            if samples:
                batch[name] = stacked([sample.images[view] for sample in samples])
            elif self.transform is not None:
                batch[name] = empty_images(self.transform)
        batch |= self.texts(samples)
        if all(sample.label is not None for sample in samples):
            batch["label"] = torch.tensor([sample.label for sample in samples], dtype=torch.long)
        batch["sample_index"] = torch.tensor([sample.sample_index for sample in samples], dtype=torch.long)
        return Collated(batch, num_read, faults)

    def texts(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return the entries of a batch for the texts of its samples: none."""
        return {}
