"""Base of all datamodules of image-caption pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..base.faults import Collated, Outcome
from ..base.pair_samples import (
    EvaluationCollate,
    EvaluationSet,
    PairReader,
    PairRows,
    TrainingCollate,
)
from ..base.samples import Reader
from ..base.stages import Split
from ..base.texts import TextDataModule
from ..transforms.normalize import in_pixels


class PairDataModule(TextDataModule):
    """Image-caption pairs, in batches of the project's contract (dicts of tensors).

    Evaluation reads each image once, with all of its captions. A subclass defines the rows in `open_split`.
    Arguments are those of `TextDataModule`.
    """

    # Methods that the base class calls

    def training_reader(self, rows: PairRows) -> Reader:
        """Return a reader of an augmented image with one of its captions."""
        return PairReader(rows, self.worker_transform(training=True), self.encoder())

    def captions(self, split: Split, sample_index: Sequence[int]) -> list[list[str]]:
        """Return the usable captions of evaluated images as texts, in the order of the evaluation.

        Args:
            split: a split that is set up.
            sample_index: indices of the images in the batches.

        Raises:
            UserError: If the split is not set up.
        """
        rows, usable = self._opened(split), self.encoder().usable
        groups = {group[0]: group for group in rows.images()}
        return [
            [text for row in groups[index] for text in rows.captions(row) if usable(text)] for index in sample_index
        ]

    def training_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """Stack the images and encode their captions."""
        return TrainingCollate(self.encoder())

    def evaluation_items(self, rows: PairRows) -> list[list[int]]:
        """Return the rows of each image."""
        return rows.images()

    def evaluation_set(self, rows: PairRows, items: list[list[int]], split: Split) -> EvaluationSet:
        """Return a dataset of images with all of their captions."""
        return EvaluationSet(
            rows, items, self.worker_transform(training=False), self.encoder(), self.run_seed, split != "predict"
        )

    def evaluation_collate(self) -> EvaluationCollate:
        """Stack the images and encode all of their captions."""
        return EvaluationCollate(self.encoder(), in_pixels(self.eval_transform))
