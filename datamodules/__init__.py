"""Datamodules: where batches come from. They import nothing from the modules or the callbacks."""

from .base import PairDataModule
from .image_text import ImageTextDataModule
from .shapes import ShapesDataModule
from .sources import Source
from .transforms import ALBEFEvalTransform, ALBEFRandAugment, ALBEFTrainTransform

__all__ = [
    "ALBEFEvalTransform",
    "ALBEFRandAugment",
    "ALBEFTrainTransform",
    "ImageTextDataModule",
    "PairDataModule",
    "ShapesDataModule",
    "Source",
]
