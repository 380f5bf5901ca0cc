"""Datamodules. They import `common`, and no other package of the project."""

from .embedded_captions import EmbeddedCaptionsDataModule
from .entailment import EntailmentDataModule
from .grounding import GroundingDataModule
from .grounding_shapes import GroundingShapesDataModule
from .image_classification import ImageClassificationDataModule
from .image_text import ImageTextDataModule
from .labels import LabelDataModule
from .nlvr import NLVR2DataModule
from .pairs import PairDataModule
from .questions import QuestionDataModule
from .reinforced import ReinforcedDataModule
from .reinforced_image_text import ReinforcedImageTextDataModule
from .reinforced_shapes import ReinforcedShapesDataModule
from .reinforcement import ReinforcementDataModule
from .shape_classes import ShapeClassesDataModule
from .shape_questions import ShapesVQADataModule
from .shape_tasks import ShapesEntailmentDataModule, ShapesNLVR2DataModule
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
    "EntailmentDataModule",
    "GroundingDataModule",
    "GroundingShapesDataModule",
    "ImageClassificationDataModule",
    "ImageNetEvalTransform",
    "ImageNetTrainTransform",
    "ImageTextDataModule",
    "LabelDataModule",
    "NLVR2DataModule",
    "PairDataModule",
    "ProbeTrainTransform",
    "QuestionDataModule",
    "ReinforcedDataModule",
    "ReinforcedImageTextDataModule",
    "ReinforcedShapesDataModule",
    "ReinforcementDataModule",
    "ShapeClassesDataModule",
    "ShapesDataModule",
    "ShapesEntailmentDataModule",
    "ShapesNLVR2DataModule",
    "ShapesVQADataModule",
    "Source",
    "VQADataModule",
]
