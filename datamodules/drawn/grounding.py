"""Datamodule of generated shapes with phrases that name one of them, for a first run of grounding."""

from __future__ import annotations

from ..base.stages import Split
from ..grounding.samples import GroundingBatches
from .pairs import ShapesDataModule
from .phrases import PhraseRows, PhraseTable


class GroundingShapesDataModule(GroundingBatches, ShapesDataModule):
    """The images of `ShapesDataModule`, with phrases such as "a small blue square": a fixture for trials.

    Training images come with the phrase of one of their two objects, without a box. Evaluation has a phrase for each of
    the two objects and four candidate boxes: both objects, and two places without an object. A random box is right for
    25% of the phrases.

    Args:
        **options: see `ShapesDataModule`. `eval_length` counts images, each with two phrases.
    """

    def open_split(self, split: Split) -> PhraseTable:
        """Open the images of a split; `predict` is the test split."""
        kind = PhraseTable if split == "train" else PhraseRows
        return kind(split, self.length, self.eval_length, self.image_size, self.data_seed)
