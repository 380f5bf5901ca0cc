"""Datamodules: where batches come from. They import nothing from the modules or the callbacks."""

from .base import PictureDataModule
from .class_transforms import CIFAREvalTransform, CIFARTrainTransform, ImageNetEvalTransform, ImageNetTrainTransform
from .clip_transforms import CLIPEvalTransform
from .embedded_captions import EmbeddedCaptionsDataModule
from .image_classification import ImageClassificationDataModule, LabelDataModule
from .image_text import ImageTextDataModule
from .pairs import PairDataModule
from .probe_transforms import ProbeTrainTransform
from .reinforced import ReinforcedDataModule, ReinforcedImageTextDataModule
from .reinforced_shapes import ReinforcedShapesDataModule
from .reinforcement import ReinforcementDataModule
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
    "CLIPEvalTransform",
    "EmbeddedCaptionsDataModule",
    "ImageClassificationDataModule",
    "ImageNetEvalTransform",
    "ImageNetTrainTransform",
    "ImageTextDataModule",
    "LabelDataModule",
    "PairDataModule",
    "PictureDataModule",
    "ProbeTrainTransform",
    "ReinforcedDataModule",
    "ReinforcedImageTextDataModule",
    "ReinforcedShapesDataModule",
    "ReinforcementDataModule",
    "ShapeClassesDataModule",
    "ShapesDataModule",
    "Source",
]
