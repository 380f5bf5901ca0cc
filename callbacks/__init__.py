"""Callbacks that any Lightning project can use."""

from .checkpoints.checkpoint_io import AtomicCheckpointIO, consolidate_checkpoint, divide_checkpoint_file
from .distributed.collectives import all_reduce_sum, gather, gather_texts, gather_uneven, rank, world_size
from .distributed.strategy import ShardedStrategy
from .ema import EMACallback, EMAPair, ema_momentum
from .figures.learngene import LearngeneFigures
from .figures.retrieval import RetrievalFigures, WordMapFigures
from .final_export import FinalExport
from .learngene_expansion import LearngeneExpansionCallback
from .learngene_writer import LearngeneWriter
from .missing import missing_callbacks
from .non_finite import SkipNonFiniteSteps
from .online_probe import OnlineProbe
from .optimizer_step import OptimizerStepCallback
from .own_classification import OwnClassification
from .queue import FeatureQueue, QueueCallback
from .step_seed import StepSeedCallback
from .stopping import StopOnSignal
from .writers.image_predictions import (
    CaptionWriter,
    ClassPredictionWriter,
    ImageEmbeddingWriter,
    TextClassPredictionWriter,
)
from .writers.reinforcement import LeftOut, Reinforced, ReinforcementWriter
from .writers.retrieval import RetrievalPredictionWriter
from .zero_shot import ZeroShotClassification

__all__ = [
    "AtomicCheckpointIO",
    "CaptionWriter",
    "ClassPredictionWriter",
    "EMACallback",
    "EMAPair",
    "FeatureQueue",
    "FinalExport",
    "ImageEmbeddingWriter",
    "LearngeneExpansionCallback",
    "LearngeneFigures",
    "LearngeneWriter",
    "LeftOut",
    "OnlineProbe",
    "OptimizerStepCallback",
    "OwnClassification",
    "QueueCallback",
    "Reinforced",
    "ReinforcementWriter",
    "RetrievalFigures",
    "RetrievalPredictionWriter",
    "ShardedStrategy",
    "SkipNonFiniteSteps",
    "StepSeedCallback",
    "StopOnSignal",
    "TextClassPredictionWriter",
    "WordMapFigures",
    "ZeroShotClassification",
    "all_reduce_sum",
    "consolidate_checkpoint",
    "divide_checkpoint_file",
    "ema_momentum",
    "gather",
    "gather_texts",
    "gather_uneven",
    "missing_callbacks",
    "rank",
    "world_size",
]
