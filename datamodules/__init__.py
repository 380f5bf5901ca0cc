"""Datamodules: where batches come from. They import nothing from the modules or the callbacks."""

from .base import PictureDataModule
from .image_text import ImageTextDataModule
from .pairs import PairDataModule
from .shapes import ShapesDataModule
from .sources import Source
from .transforms import ALBEFEvalTransform, ALBEFRandAugment, ALBEFTrainTransform

__all__ = [
    "ALBEFEvalTransform",
    "ALBEFRandAugment",
    "ALBEFTrainTransform",
    "ImageTextDataModule",
    "PairDataModule",
    "PictureDataModule",
    "ShapesDataModule",
    "Source",
]
