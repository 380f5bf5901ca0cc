"""Callbacks that any Lightning project can use.

A module is imported when one of its names is first used, so that `EMACallback` does not import the libraries of other
callbacks.
"""

from typing import TYPE_CHECKING, Any

from ..common.lazy import LazyNames

if TYPE_CHECKING:
    from .checkpoints.checkpoint_io import (
        AtomicCheckpointIO,
        consolidate_checkpoint,
        divide_checkpoint_file,
    )
    from .classification.neighbours import NearestNeighbourClassification
    from .classification.own import OwnClassification
    from .classification.zero_shot import ZeroShotClassification
    from .compile import CompileCallback
    from .distributed.collectives import (
        all_reduce_sum,
        gather,
        gather_texts,
        gather_uneven,
        rank,
        world_size,
    )
    from .distributed.strategy import ShardedStrategy
    from .ema import EMACallback, EMAPair, ema_momentum
    from .figures.answers import AnswerFigures
    from .figures.grounding import GroundingFigures
    from .figures.learngene import LearngeneFigures
    from .figures.predictions import PredictionFigures
    from .figures.projector import EmbeddingProjector
    from .figures.retrieval import RetrievalFigures
    from .figures.word_maps import WordMapFigures
    from .final_export import FinalExport
    from .learngene_expansion import LearngeneExpansionCallback
    from .learngene_writer import LearngeneWriter
    from .modules import missing_callbacks
    from .non_finite import SkipNonFiniteSteps
    from .online_probe import OnlineLinearProbe
    from .optimizer_step import OptimizerStepCallback
    from .progress_lines import ProgressLines
    from .queue import FeatureQueue, QueueCallback
    from .speed import SpeedMonitor
    from .starting_point import StartingPoint
    from .step_seed import StepSeedCallback
    from .stopping import StopOnSignal
    from .stuck_loss import StuckLossWarning
    from .writers.answers import AnswerWriter
    from .writers.captions import CaptionWriter
    from .writers.class_predictions import ClassPredictionWriter
    from .writers.grounding import GroundingWriter
    from .writers.image_embeddings import ImageEmbeddingWriter
    from .writers.reinforced import LeftOut, Reinforced
    from .writers.reinforcement import ReinforcementWriter
    from .writers.retrieval import RetrievalPredictionWriter
    from .writers.text_class_predictions import TextClassPredictionWriter

_NAMES = {
    "checkpoints.checkpoint_io": ("AtomicCheckpointIO", "consolidate_checkpoint", "divide_checkpoint_file"),
    "classification.neighbours": ("NearestNeighbourClassification",),
    "classification.own": ("OwnClassification",),
    "classification.zero_shot": ("ZeroShotClassification",),
    "compile": ("CompileCallback",),
    "distributed.collectives": ("all_reduce_sum", "gather", "gather_texts", "gather_uneven", "rank", "world_size"),
    "distributed.strategy": ("ShardedStrategy",),
    "ema": ("EMACallback", "EMAPair", "ema_momentum"),
    "figures.answers": ("AnswerFigures",),
    "figures.grounding": ("GroundingFigures",),
    "figures.learngene": ("LearngeneFigures",),
    "figures.predictions": ("PredictionFigures",),
    "figures.projector": ("EmbeddingProjector",),
    "figures.retrieval": ("RetrievalFigures",),
    "figures.word_maps": ("WordMapFigures",),
    "final_export": ("FinalExport",),
    "learngene_expansion": ("LearngeneExpansionCallback",),
    "learngene_writer": ("LearngeneWriter",),
    "modules": ("missing_callbacks",),
    "non_finite": ("SkipNonFiniteSteps",),
    "online_probe": ("OnlineLinearProbe",),
    "optimizer_step": ("OptimizerStepCallback",),
    "progress_lines": ("ProgressLines",),
    "queue": ("FeatureQueue", "QueueCallback"),
    "speed": ("SpeedMonitor",),
    "starting_point": ("StartingPoint",),
    "step_seed": ("StepSeedCallback",),
    "stopping": ("StopOnSignal",),
    "stuck_loss": ("StuckLossWarning",),
    "writers.answers": ("AnswerWriter",),
    "writers.captions": ("CaptionWriter",),
    "writers.class_predictions": ("ClassPredictionWriter",),
    "writers.grounding": ("GroundingWriter",),
    "writers.image_embeddings": ("ImageEmbeddingWriter",),
    "writers.reinforced": ("LeftOut", "Reinforced"),
    "writers.reinforcement": ("ReinforcementWriter",),
    "writers.retrieval": ("RetrievalPredictionWriter",),
    "writers.text_class_predictions": ("TextClassPredictionWriter",),
}
_LAZY = LazyNames(__name__, _NAMES)

__all__ = [
    "AnswerFigures",
    "AnswerWriter",
    "AtomicCheckpointIO",
    "CaptionWriter",
    "ClassPredictionWriter",
    "CompileCallback",
    "EMACallback",
    "EMAPair",
    "EmbeddingProjector",
    "FeatureQueue",
    "FinalExport",
    "GroundingFigures",
    "GroundingWriter",
    "ImageEmbeddingWriter",
    "LearngeneExpansionCallback",
    "LearngeneFigures",
    "LearngeneWriter",
    "LeftOut",
    "NearestNeighbourClassification",
    "OnlineLinearProbe",
    "OptimizerStepCallback",
    "OwnClassification",
    "PredictionFigures",
    "ProgressLines",
    "QueueCallback",
    "Reinforced",
    "ReinforcementWriter",
    "RetrievalFigures",
    "RetrievalPredictionWriter",
    "ShardedStrategy",
    "SkipNonFiniteSteps",
    "SpeedMonitor",
    "StartingPoint",
    "StepSeedCallback",
    "StopOnSignal",
    "StuckLossWarning",
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
    "load_all",
    "missing_callbacks",
    "rank",
    "world_size",
]


def load_all() -> None:
    """Import every public name, so that a command line finds the classes by their short names."""
    _LAZY.load_all()


def __getattr__(name: str) -> Any:
    return _LAZY.get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
