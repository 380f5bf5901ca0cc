"""Datamodule of questions about generated colored shapes, for a first run without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .core.stages import Split
from .questions import QuestionDataModule
from .sources.shape_questions import ANSWERS, ShapeQuestionTable
from .transforms.clip import pair_eval_transform, pair_train_transform


class ShapesVQADataModule(QuestionDataModule):
    """Questions about two colored shapes: their color, their shape, how many there are, whether there is one.

    A fixture for trials, not a benchmark. The images are those of :class:`ShapesDataModule`, and so is the trained
    tokenizer, which spells the words that captions do not have.

    Args:
        length: number of training images in an epoch, each with ``questions_per_image`` questions.
        eval_length: number of images in the validation split, and in the test split, each with four questions.
        data_seed: seed of the content. Separate from ``seed``, so that runs with different seeds have the same test
            split.
        image_size: side of the images, pixels.
        min_crop: smallest share of the image's area in a training crop; low values crop objects.
        batch_size: training rows per process and batch.
        num_workers: loader workers per process.
        vocab_size: largest number of tokenizer entries.
        append_sep: whether questions end with [SEP], as in the ALBEF quickstart.
        **options: see :class:`QuestionDataModule`. Prediction reads the images of the test split.
    """

    def __init__(
        self,
        length: int = 20_000,
        eval_length: int = 256,
        data_seed: int = 0,
        image_size: int = 64,
        min_crop: float = 0.9,
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

    @property
    def answers(self) -> Sequence[str]:
        """The answers that are ranked: colors, shapes, yes and no, numbers."""
        return ANSWERS

    def default_train_transform(self) -> nn.Module:
        """Return a crop, with the normalization that trained weights expect."""
        crop = {"scale": (self.min_crop, 1.0), "ratio": (1.0, 1.0), "horizontal_flip": 0.0, "rand_augment": False}
        return pair_train_transform(self.image_size, self.expected_preprocessing(), **crop)

    def default_eval_transform(self) -> nn.Module:
        """Return the transform that trained weights expect, else ALBEF's."""
        return pair_eval_transform(self.image_size, self.expected_preprocessing())

    def open_split(self, split: Split) -> ShapeQuestionTable:
        """Open the images of a split; ``predict`` is the test split."""
        return ShapeQuestionTable(split, *self.content, self.questions_per_image)
