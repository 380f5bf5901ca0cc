"""Samples and batches of vision-language tasks: one or two images, a text, and a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image

from ..base.faults import EMPTY_CAPTION, BadSample, Collated, Outcome
from ..base.samples import Rows, Transform, empty_images, stacked, usable_samples
from ..base.sampling import seeded, view_seed
from ..text.tokenizers import Encoder


class TaskRows(Rows, Protocol):
    """Rows of images with a text and a target."""

    def all_images(self, row: int) -> list[Image.Image]:
        """Return the decoded images (RGB) of a row; raises `BadSample`."""

    def all_image_names(self, row: int) -> list[str]:
        """Return the path of each image, or the name of the row if the data contains the image."""

    def text(self, row: int) -> str:
        """Return the raw text; raises `BadSample`."""

    def target(self, row: int) -> Any:
        """Return what the text is to be given, such as a class index; None without; raises `BadSample`."""


class TaskSample(NamedTuple):
    """A usable row."""

    images: tuple[torch.Tensor, ...]
    text: str
    target: Any
    sample_index: int


@dataclass
class TaskReader:
    """Reader of samples: the images, each with augmentation of its own, the text and the target.

    Args:
        rows: rows of the split.
        transform: image to float [3, H, W].
        encoder: decides which texts are usable.
    """

    rows: TaskRows
    transform: Transform
    encoder: Encoder

    def __call__(self, row: int, numbers: tuple[int, int]) -> TaskSample:
        """Read a row; arguments and errors as in `Reader`."""
        text = self.rows.text(row)
        target = self.rows.target(row)
        if not self.encoder.usable(text):
            raise BadSample(EMPTY_CAPTION, self.rows.name(row))
        images = []
        for view, image in enumerate(self.rows.all_images(row)):
            with seeded(view_seed(numbers[0], view)):
                images.append(self.transform(image))
        return TaskSample(tuple(images), text, target, row)


@dataclass
class TaskCollate:
    """Build batches: the images, `input_ids` and `attention_mask` [B, L], the targets, and `sample_index` [B].

    Args:
        images: names of the images of a sample.
        encoder: encodes the texts.
        transform: determines the image size of an empty batch; None in training, where a missing sample ends the run.
    """

    images: Sequence[str]
    encoder: Encoder
    transform: Transform | None = None

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images and encode the texts."""
        samples, num_read, faults = usable_samples(outcomes)
        if self.transform is None and len(samples) < len(outcomes):
            return Collated(None, num_read, faults)  # no usable substitute was found: the loader ends the run
        batch: dict[str, Any] = {
            name: stacked([sample.images[index] for sample in samples]) if samples else self._no_images()
            for index, name in enumerate(self.images)
        }
        batch |= self.encoder([sample.text for sample in samples])
        if all(sample.target is not None for sample in samples):
            batch |= self.targets([sample.target for sample in samples])
        batch["sample_index"] = torch.tensor([sample.sample_index for sample in samples], dtype=torch.long)
        return Collated(batch, num_read, faults)

    def targets(self, targets: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the batch's entries for the targets: `label`, long [B]."""
        return {"label": torch.tensor(targets, dtype=torch.long)}

    def _no_images(self) -> torch.Tensor:
        assert self.transform is not None
        return empty_images(self.transform)
