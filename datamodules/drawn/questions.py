"""Datamodule of questions about generated colored shapes, for a first run without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.stages import Split
from ..questions.datamodule import QuestionDataModule
from .question_rows import ANSWERS, ShapeQuestionTable
from .tasks import DrawnShapes


class ShapesVQADataModule(DrawnShapes, QuestionDataModule):
    """Questions about two colored shapes: their color, their shape, how many there are, whether there is one.

    A fixture for trials, not a benchmark. The images are those of `ShapesDataModule`, and so is the trained
    tokenizer, which spells the words that captions do not have.

    Args:
        eval_length: number of images in the validation split, and in the test split, each with four questions.
        **options: see `DrawnShapes` and `QuestionDataModule`; a training image has
            `questions_per_image` questions.
    """

    def __init__(self, eval_length: int = 256, **options: Any) -> None:
        super().__init__(eval_length=eval_length, **options)

    @property
    def answers(self) -> Sequence[str]:
        """The answers that are ranked: colors, shapes, yes and no, numbers."""
        return ANSWERS

    def open_split(self, split: Split) -> ShapeQuestionTable:
        """Open the images of a split; `predict` is the test split."""
        return ShapeQuestionTable(split, *self.content, self.questions_per_image)
