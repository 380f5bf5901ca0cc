"""Callbacks that any Lightning project can use."""

from .checkpoint_io import AtomicCheckpointIO, consolidate_checkpoint, divide_checkpoint_file
from .distributed import all_reduce_sum, gather, gather_texts, gather_uneven, rank, world_size
from .ema import EMACallback, EMAPair, ema_momentum
from .figures import RetrievalFigures, WordMapFigures
from .final_export import FinalExport
from .learngene import LearngeneExpansionCallback, LearngeneWriter
from .learngene_expansion import expand_learngene
from .learngene_figures import LearngeneFigures, LearngeneTerms
from .learngene_file import Learngene, LearngeneSizes, load_learngene, save_learngene
from .missing import missing_callbacks
from .non_finite import SkipNonFiniteSteps
from .online_probe import OnlineProbe
from .optimizer_step import OptimizerStepCallback
from .own_classification import OwnClassification
from .picture_predictions import CaptionWriter, ClassPredictionWriter, ImageEmbeddingWriter, TextClassPredictionWriter
from .predictions import RetrievalPredictionWriter
from .queue import FeatureQueue, QueueCallback
from .reinforcement_writer import LeftOut, Reinforced, ReinforcementWriter
from .sharded_strategy import ShardedStrategy
from .step_seed import StepSeedCallback
from .stopping import StopOnSignal
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
    "Learngene",
    "LearngeneExpansionCallback",
    "LearngeneFigures",
    "LearngeneSizes",
    "LearngeneTerms",
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
    "expand_learngene",
    "gather",
    "gather_texts",
    "gather_uneven",
    "load_learngene",
    "missing_callbacks",
    "rank",
    "save_learngene",
    "world_size",
]
