"""Datamodules. They import `common`, and no other package of the project."""

from .embedded_captions import EmbeddedCaptionsDataModule
from .image_classification import ImageClassificationDataModule
from .image_text import ImageTextDataModule
from .labels import LabelDataModule
from .pairs import PairDataModule
from .questions import QuestionDataModule
from .reinforced import ReinforcedDataModule
from .reinforced_image_text import ReinforcedImageTextDataModule
from .reinforced_shapes import ReinforcedShapesDataModule
from .reinforcement import ReinforcementDataModule
from .shape_classes import ShapeClassesDataModule
from .shape_questions import ShapeQuestionsDataModule
from .shapes import ShapesDataModule
from .sources.resolve import Source
from .transforms.albef import ALBEFEvalTransform, ALBEFRandAugment, ALBEFTrainTransform
from .transforms.classification import (
    CIFAREvalTransform,
    CIFARTrainTransform,
    ImageNetEvalTransform,
    ImageNetTrainTransform,
)
from .transforms.clip import CLIPEvalTransform
from .transforms.probe import ProbeTrainTransform
from .vqa import VQADataModule

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
    "ProbeTrainTransform",
    "QuestionDataModule",
    "ReinforcedDataModule",
    "ReinforcedImageTextDataModule",
    "ReinforcedShapesDataModule",
    "ReinforcementDataModule",
    "ShapeClassesDataModule",
    "ShapeQuestionsDataModule",
    "ShapesDataModule",
    "Source",
    "VQADataModule",
]
