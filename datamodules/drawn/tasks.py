"""Datamodules of generated colored shapes for tasks, for a first run without a download: texts to judge, questions."""

from __future__ import annotations

from typing import Annotated, Any

from torch import nn

from ...common.ranges import COUNT, POSITIVE_SHARE, SEED
from ..base.stages import Split
from ..base.texts import TextDataModule
from ..tasks.datamodule import TaskDataModule
from ..transforms.clip import pair_eval_transform, pair_train_transform
from .task_rows import ShapeEntailmentTable, ShapePairTable


class DrawnShapes(TextDataModule):
    """Arguments and transforms of the datamodules of drawn shapes; a base class before that of the task.

    Args:
        length: number of training rows in an epoch; of questions, number of images.
        eval_length: number of rows in the validation split, and in the test split; of questions, number of images.
        data_seed: seed of the content. Separate from `seed`, so that runs with different seeds have the same test
            split.
        image_size: side of the images, pixels.
        min_crop: smallest share of the image's area in a training crop; low values crop objects.
        batch_size: training rows per process and batch.
        num_workers: loader workers per process.
        vocab_size: largest number of tokenizer entries.
        append_sep: whether sequences end with [SEP], as in the ALBEF quickstart.
        **options: see the base class of the task. Prediction reads the images of the test split.
    """

    def __init__(
        self,
        length: Annotated[int, COUNT] = 20_000,
        eval_length: Annotated[int, COUNT] = 512,
        data_seed: Annotated[int, SEED] = 0,
        image_size: Annotated[int, COUNT] = 64,
        min_crop: Annotated[float, POSITIVE_SHARE] = 0.9,
        batch_size: int = 128,
        num_workers: int = 0,
        vocab_size: int = 320,
        append_sep: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, vocab_size=vocab_size, append_sep=append_sep, **options
        )
        self.content = (length, eval_length, image_size, data_seed)
        self.image_size = image_size
        self.min_crop = min_crop

    def default_train_transform(self) -> nn.Module:
        """Return a crop, with the normalization that trained weights expect."""
        crop = {"scale": (self.min_crop, 1.0), "ratio": (1.0, 1.0), "horizontal_flip": 0.0, "rand_augment": False}
        return pair_train_transform(self.image_size, self.expected_preprocessing(), **crop)

    def default_eval_transform(self) -> nn.Module:
        """Return the transform that trained weights expect, else ALBEF's."""
        return pair_eval_transform(self.image_size, self.expected_preprocessing())


class ShapesEntailmentDataModule(DrawnShapes, TaskDataModule):
    """Captions that an image of two shapes, of which a panel may hide one, entails, contradicts, or leaves open.

    A fixture for trials, not a benchmark. Chance is 33.3%; whoever sees only whether there is a panel gets 66.7%, and
    the caption alone tells nothing.

    Args:
        **options: see `DrawnShapes` and `TaskDataModule`.
    """

    class_names = ("contradiction", "neutral", "entailment")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def open_split(self, split: Split) -> ShapeEntailmentTable:
        """Open the images of a split; `predict` is the test split."""
        return ShapeEntailmentTable(split, *self.content)


class ShapesNLVR2DataModule(DrawnShapes, TaskDataModule):
    """Statements such as "a red ring in the left image", true or false, about two images of two shapes each.

    A fixture for trials, not a benchmark. Chance is 50%, also from the statement or from the images alone.

    Args:
        **options: see `DrawnShapes` and `TaskDataModule`.
    """

    image_names = ("image_left", "image_right")
    class_names = ("False", "True")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def open_split(self, split: Split) -> ShapePairTable:
        """Open the images of a split; `predict` is the test split."""
        return ShapePairTable(split, *self.content)
