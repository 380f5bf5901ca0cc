"""Generated colored shapes with captions, for a first run without a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import lightning.pytorch as pl
from torch import nn

from ...common.ranges import COUNT, POSITIVE_SHARE, SEED, CheckedArguments
from ..base.stages import Split
from ..pairs.datamodule import PairDataModule
from ..transforms.albef import pair_train_transform
from .shapes import ShapesTable


class DrawnShapes(CheckedArguments, pl.LightningDataModule):
    """Arguments and transforms of the datamodules of drawn shapes; a base class before that of the task.

    Prediction reads the images of the test split.

    Args:
        length: number of training rows in an epoch; of questions, number of images.
        eval_length: number of rows in the validation split, and in the test split; of questions, number of images. Of
            captions and phrases, each image shows another pair of objects.
        data_seed: seed of the content of the images. Separate from `seed`, so that runs with different seeds have the
            same test split.
        image_size: side of the images, pixels.
        min_crop: smallest share of the image's area in a training crop; low values crop objects.
        batch_size: training rows per process and batch.
        num_workers: loader workers per process.
        vocab_size: largest number of tokenizer entries. The captions need about 250, of which 104 are reserved.
        rand_augment: whether to apply ALBEF's RandAugment in training. Off by default: a translation or a changed color
            can make a text wrong.
    """

    # Members of `ImageTransforms`
    expected_preprocessing: Callable[[], Mapping[str, Any]]
    image_size: Any

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
        rand_augment: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, vocab_size=vocab_size, **options)
        self.length = length
        self.eval_length = eval_length
        self.data_seed = data_seed
        self.image_size = image_size
        self.min_crop = min_crop
        self.rand_augment = rand_augment

    @property
    def content(self) -> tuple[int, int, int, int]:
        """Number of training and of evaluation images, their side in pixels, and the seed of their content."""
        return self.length, self.eval_length, self.image_size, self.data_seed

    def default_train_transform(self) -> nn.Module:
        """Return a crop and optionally RandAugment, with the normalization that trained weights expect."""
        return pair_train_transform(
            self.image_size,
            self.expected_preprocessing(),
            scale=(self.min_crop, 1.0),
            ratio=(1.0, 1.0),
            horizontal_flip=0.0,
            rand_augment=self.rand_augment,
        )


class ShapesDataModule(DrawnShapes, PairDataModule):
    """Two colored shapes and their spatial relation: a fixture for trials, not a benchmark.

    A caption reads "a large red circle to the left of a small blue square": 80 objects (2 sizes, 8 colors, 5 shapes),
    3160 pairs of different objects, 4 relations, 12,640 captions in all, one per image. Validation and test show pairs
    of objects that occur in no other split; every single object occurs in training. An image is a function of
    (`data_seed`, split, index) only.
    """

    def open_split(self, split: Split) -> ShapesTable:
        """Open the images of a split; `predict` is the test split."""
        return ShapesTable(split, *self.content)
