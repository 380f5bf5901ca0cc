"""Samples and batches of grounding: an image, a text, candidate boxes and the right one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image

from ..base.faults import BadSample, Collated, Outcome
from ..base.samples import SeededSet, Transform, usable_samples
from ..base.stages import Split
from ..pairs.samples import EvaluationCollate, EvaluationReader, PairRows
from ..text.tokenizers import Encoder
from ..transforms.normalize import in_pixels

Box = Sequence[float]
"""x, y, width and height in pixels, from the upper left corner of the image."""
NO_BOXES, OUTSIDE, INVALID = "no boxes", "box outside the image", "invalid box"
EDGE = 1.0
"""Pixels that a box may leave the image by, which rounding causes."""


class Target(NamedTuple):
    """The boxes of a text.

    Attributes:
        boxes: candidates, at least one.
        right: the box that the text refers to; None if unknown.
        part: the part of the data set, such as "testA"; empty if there are no parts.
        ref_id: number of the reference in the annotations; -1 without such annotations.
    """

    boxes: Sequence[Box]
    right: Box | None
    part: str = ""
    ref_id: int = -1


class GroundingRows(PairRows, Protocol):
    """Rows of an image and one text each, with boxes."""

    def target(self, row: int) -> Target:
        """Return the boxes of a row; raises `BadSample`."""


class GroundingSample(NamedTuple):
    """A usable image with a text: its `pairs.samples.Sample`, its boxes, and its size in pixels."""

    pair: Any
    target: Target
    size: tuple[int, int]  # height, width


def check_boxes(target: Target, size: tuple[int, int], name: str, needs_right: bool) -> None:
    """Check that the boxes of a text are in its image, up to `EDGE`.

    Boxes given by two corners usually leave the image, so they are refused.

    Args:
        target: the boxes.
        size: height and width of the image.
        name: name of the row in messages.
        needs_right: whether a text without a right box is unusable.

    Raises:
        BadSample: If a box is outside or invalid, or there is none.
    """
    if not target.boxes or (needs_right and target.right is None):
        raise BadSample(NO_BOXES, name)
    height, width = size
    for box in [*target.boxes, *([] if target.right is None else [target.right])]:
        if len(box) != 4 or not all(map(math.isfinite, box)) or min(box[2:]) <= 0:
            raise BadSample(INVALID, f"{name} ({list(box)})")
        left, top, wide, high = box
        if min(left, top) < -EDGE or left + wide > width + EDGE or top + high > height + EDGE:
            raise BadSample(
                OUTSIDE, f"{name} ({list(box)} in {width} x {height} pixels; boxes are x, y, width, height)"
            )


@dataclass(eq=False)
class GroundingEvaluationSet(SeededSet):
    """Texts of an evaluation split, each with its image and boxes; unusable texts are skipped, never replaced."""

    table: GroundingRows
    read: EvaluationReader
    needs_right: bool

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> Outcome:
        name = self.table.name(row)
        sizes: list[tuple[int, int]] = []
        try:
            target = self.table.target(row)
            texts = self.table.captions(row)
            image_id = self.table.image_id(row)
        except BadSample as bad:
            return Outcome(None, 1, [bad.fault])

        def load() -> Image.Image:
            image = self.table.image(row)
            sizes.append((image.height, image.width))
            check_boxes(target, sizes[0], name, self.needs_right)
            return image

        outcome = self.read(load, texts, name, image_id, row)
        if outcome.sample is not None:
            outcome.sample = GroundingSample(outcome.sample, target, sizes[0])
        return outcome


@dataclass
class GroundingCollate:
    """Build evaluation batches: those of `EvaluationCollate` with one text per image, and boxes.

    `size` [B, 2] is the height and the width of each image in pixels, `boxes` a list of B tensors [K, 4],
    `right_box` [B, 4] is NaN where unknown, `ref_id` [B], `part` a list of B strings.
    """

    encoder: Encoder
    transform: Transform

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Build a batch of samples."""
        samples, num_read, faults = usable_samples(outcomes)
        pairs = EvaluationCollate(self.encoder, self.transform)([Outcome(sample.pair) for sample in samples])
        targets = [sample.target for sample in samples]
        unknown = [math.nan] * 4
        rights = [unknown if target.right is None else [float(value) for value in target.right] for target in targets]
        batch: dict[str, Any] = {
            **(pairs.batch or {}),
            "size": torch.tensor([sample.size for sample in samples], dtype=torch.long).reshape(-1, 2),
            "boxes": [torch.tensor([[float(value) for value in box] for box in target.boxes]) for target in targets],
            "right_box": torch.tensor(rights).reshape(-1, 4),
            "ref_id": torch.tensor([target.ref_id for target in targets], dtype=torch.long),
            "part": [target.part for target in targets],
        }
        return Collated(batch, num_read, faults)


class GroundingBatches:
    """Evaluation of a datamodule on texts with boxes; a base class beside a `PairDataModule`."""

    eval_transform: Any
    worker_transform: Callable[..., Any]
    encoder: Callable[[], Encoder]
    run_seed: int
    _opened: Callable[[Split], Any]

    def evaluation_items(self, rows: Any) -> Any:
        """Return the rows, one text each."""
        return range(len(rows))

    def evaluation_set(self, rows: Any, items: Any, split: Split) -> Any:
        """Return a dataset of images with one text and its boxes."""
        reader = EvaluationReader(self.worker_transform(training=False), self.encoder(), self.run_seed, True)
        return GroundingEvaluationSet(rows, reader, split != "predict")

    def evaluation_collate(self, split: Split) -> Any:
        """Stack the images, and encode the texts."""
        return GroundingCollate(self.encoder(), in_pixels(self.eval_transform))

    def captions(self, split: Split, sample_index: Sequence[int]) -> list[list[str]]:
        """Return the text of each `sample_index`, in a list."""
        rows = self._opened(split)
        return [rows.captions(index) for index in sample_index]
