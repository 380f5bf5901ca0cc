"""Samples and batches of vision-language tasks: one or two images, a text, and a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image

from ..base.faults import EMPTY_CAPTION, BadSample
from ..base.samples import Transform
from ..base.sampling import seeded, view_seed
from ..labels.samples import LabelCollate, LabeledRows
from ..text.tokenizers import Encoder


class TaskRows(LabeledRows, Protocol):
    """Rows of images with a text and a label."""

    def all_images(self, row: int) -> list[Image.Image]:
        """Return the decoded images (RGB) of a row; raises `BadSample`."""

    def all_image_names(self, row: int) -> list[str]:
        """Return the path of each image, or the name of the row if the data contains the image."""

    def text(self, row: int) -> str:
        """Return the raw text; raises `BadSample`."""


class TaskSample(NamedTuple):
    """A usable row."""

    images: tuple[torch.Tensor, ...]
    text: str
    label: int | None
    sample_index: int


@dataclass
class TaskReader:
    """Reader of samples: the images, each with augmentation of its own, the text and the label.

    Arguments as in `PairReader`.
    """

    rows: TaskRows
    transform: Transform
    encoder: Encoder

    def __call__(self, row: int, numbers: tuple[int, int]) -> TaskSample:
        """Read a row; arguments and errors as in `Reader`."""
        text = self.rows.text(row)
        label = self.rows.label(row)
        if not self.encoder.usable(text):
            raise BadSample(EMPTY_CAPTION, self.rows.name(row))
        images = []
        for view, image in enumerate(self.rows.all_images(row)):
            with seeded(view_seed(numbers[0], view)):
                images.append(self.transform(image))
        return TaskSample(tuple(images), text, label, row)


@dataclass(kw_only=True)
class TaskCollate(LabelCollate):
    """Build batches as `LabelCollate` does, with `input_ids` and `attention_mask` [B, L] of the texts."""

    encoder: Encoder

    def texts(self, samples: Sequence[TaskSample]) -> dict[str, Any]:
        """Encode the texts."""
        return self.encoder([sample.text for sample in samples])
