"""Datamodules. They import `common`, and no other package of the project."""

from .drawn.grounding import GroundingShapesDataModule
from .drawn.labels import ShapeClassesDataModule
from .drawn.pairs import ShapesDataModule
from .drawn.questions import ShapesVQADataModule
from .drawn.reinforced import ReinforcedShapesDataModule
from .drawn.tasks import ShapesEntailmentDataModule, ShapesNLVR2DataModule
from .grounding.datamodule import GroundingDataModule
from .labels.datamodule import ImageClassificationDataModule, LabelDataModule
from .pairs.datamodule import ImageTextDataModule, PairDataModule
from .pairs.embedded import EmbeddedCaptionsDataModule
from .pairs.parallel import ParallelTextDataModule
from .questions.datamodule import QuestionDataModule, VQADataModule
from .reading.resolve import Source
from .reinforced.datamodule import ReinforcedDataModule, ReinforcedImageTextDataModule
from .reinforced.reinforcement import ReinforcementDataModule
from .tasks.datamodule import EntailmentDataModule, NLVR2DataModule
from .transforms.albef import ALBEFEvalTransform, ALBEFRandAugment, ALBEFTrainTransform
from .transforms.classification import (
    CIFAREvalTransform,
    CIFARTrainTransform,
    ImageNetEvalTransform,
    ImageNetTrainTransform,
    ProbeTrainTransform,
)
from .transforms.clip import CLIPEvalTransform

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
    "ParallelTextDataModule",
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
