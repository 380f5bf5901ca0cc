"""Datamodules: where batches come from. They import nothing from the modules or the callbacks."""

from .base import PictureDataModule
from .class_transforms import CIFAREvalTransform, CIFARTrainTransform, ImageNetEvalTransform, ImageNetTrainTransform
from .image_classification import ImageClassificationDataModule, LabelDataModule
from .image_text import ImageTextDataModule
from .pairs import PairDataModule
from .shape_classes import ShapeClassesDataModule
from .shapes import ShapesDataModule
from .sources import Source
from .transforms import ALBEFEvalTransform, ALBEFRandAugment, ALBEFTrainTransform

__all__ = [
    "ALBEFEvalTransform",
    "ALBEFRandAugment",
    "ALBEFTrainTransform",
    "CIFAREvalTransform",
    "CIFARTrainTransform",
    "ImageClassificationDataModule",
    "ImageNetEvalTransform",
    "ImageNetTrainTransform",
    "ImageTextDataModule",
    "LabelDataModule",
    "PairDataModule",
    "PictureDataModule",
    "ShapeClassesDataModule",
    "ShapesDataModule",
    "Source",
]
