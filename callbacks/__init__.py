"""Callbacks that any Lightning project can use.

A module is imported when one of its names is first used, so that `EMACallback` does not import the libraries of other
callbacks.
"""

from typing import TYPE_CHECKING, Any

from ..common.lazy import LazyNames

# For type checkers, to which `as` exports a name; `_NAMES` is what `LazyNames` imports when it is used.
if TYPE_CHECKING:
    from .checkpoints.checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
    from .checkpoints.checkpoint_io import consolidate_checkpoint as consolidate_checkpoint
    from .checkpoints.checkpoint_io import divide_checkpoint_file as divide_checkpoint_file
    from .classification.class_logits import OwnClassification as OwnClassification
    from .classification.neighbours import NearestNeighbourClassification as NearestNeighbourClassification
    from .classification.zero_shot import ZeroShotClassification as ZeroShotClassification
    from .compile import CompileCallback as CompileCallback
    from .distributed.collectives import all_reduce_sum as all_reduce_sum
    from .distributed.collectives import gather as gather
    from .distributed.collectives import gather_texts as gather_texts
    from .distributed.collectives import gather_uneven as gather_uneven
    from .distributed.collectives import rank as rank
    from .distributed.collectives import world_size as world_size
    from .distributed.strategy import ShardedStrategy as ShardedStrategy
    from .ema import EMACallback as EMACallback
    from .ema import EMAPair as EMAPair
    from .ema import ema_momentum as ema_momentum
    from .figures.learngene import LearngeneFigures as LearngeneFigures
    from .figures.retrieval import EmbeddingProjector as EmbeddingProjector
    from .figures.retrieval import RetrievalFigures as RetrievalFigures
    from .figures.samples import AnswerFigures as AnswerFigures
    from .figures.samples import GroundingFigures as GroundingFigures
    from .figures.samples import PredictionFigures as PredictionFigures
    from .figures.word_maps import WordMapFigures as WordMapFigures
    from .final_export import FinalExport as FinalExport
    from .learngene.callbacks import LearngeneExpansionCallback as LearngeneExpansionCallback
    from .learngene.callbacks import LearngeneWriter as LearngeneWriter
    from .modules import missing_callbacks as missing_callbacks
    from .non_finite import SkipNonFiniteSteps as SkipNonFiniteSteps
    from .online_probe import OnlineLinearProbe as OnlineLinearProbe
    from .optimizer_step import OptimizerStepCallback as OptimizerStepCallback
    from .progress import ProgressLines as ProgressLines
    from .queue import FeatureQueue as FeatureQueue
    from .queue import QueueCallback as QueueCallback
    from .speed import SpeedMonitor as SpeedMonitor
    from .speed import StarvedStepWarning as StarvedStepWarning
    from .starting_point import StartingPoint as StartingPoint
    from .step_seed import StepSeedCallback as StepSeedCallback
    from .stopping import StopOnSignal as StopOnSignal
    from .stuck_loss import StuckLossWarning as StuckLossWarning
    from .writers.classes import ClassPredictionWriter as ClassPredictionWriter
    from .writers.classes import TextClassPredictionWriter as TextClassPredictionWriter
    from .writers.grounding import GroundingWriter as GroundingWriter
    from .writers.reinforced import LeftOut as LeftOut
    from .writers.reinforced import Reinforced as Reinforced
    from .writers.reinforcement import ReinforcementWriter as ReinforcementWriter
    from .writers.retrieval import RetrievalPredictionWriter as RetrievalPredictionWriter
    from .writers.texts import AnswerWriter as AnswerWriter
    from .writers.texts import CaptionWriter as CaptionWriter

_NAMES = {
    "checkpoints.checkpoint_io": ("AtomicCheckpointIO", "consolidate_checkpoint", "divide_checkpoint_file"),
    "classification.class_logits": ("OwnClassification",),
    "classification.neighbours": ("NearestNeighbourClassification",),
    "classification.zero_shot": ("ZeroShotClassification",),
    "compile": ("CompileCallback",),
    "distributed.collectives": ("all_reduce_sum", "gather", "gather_texts", "gather_uneven", "rank", "world_size"),
    "distributed.strategy": ("ShardedStrategy",),
    "ema": ("EMACallback", "EMAPair", "ema_momentum"),
    "figures.learngene": ("LearngeneFigures",),
    "figures.retrieval": ("EmbeddingProjector", "RetrievalFigures"),
    "figures.samples": ("AnswerFigures", "GroundingFigures", "PredictionFigures"),
    "figures.word_maps": ("WordMapFigures",),
    "final_export": ("FinalExport",),
    "learngene.callbacks": ("LearngeneExpansionCallback", "LearngeneWriter"),
    "modules": ("missing_callbacks",),
    "non_finite": ("SkipNonFiniteSteps",),
    "online_probe": ("OnlineLinearProbe",),
    "optimizer_step": ("OptimizerStepCallback",),
    "progress": ("ProgressLines",),
    "queue": ("FeatureQueue", "QueueCallback"),
    "speed": ("SpeedMonitor", "StarvedStepWarning"),
    "starting_point": ("StartingPoint",),
    "step_seed": ("StepSeedCallback",),
    "stopping": ("StopOnSignal",),
    "stuck_loss": ("StuckLossWarning",),
    "writers.classes": ("ClassPredictionWriter", "TextClassPredictionWriter"),
    "writers.grounding": ("GroundingWriter",),
    "writers.reinforced": ("LeftOut", "Reinforced"),
    "writers.reinforcement": ("ReinforcementWriter",),
    "writers.retrieval": ("RetrievalPredictionWriter",),
    "writers.texts": ("AnswerWriter", "CaptionWriter"),
}
_LAZY = LazyNames(__name__, _NAMES)
__all__ = sorted([*_LAZY.modules, "load_all"])


def load_all() -> None:
    """Import every public name, so that a command line finds the classes by their short names."""
    _LAZY.load_all()


def __getattr__(name: str) -> Any:
    return _LAZY.get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
