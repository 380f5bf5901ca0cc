"""Callbacks that any Lightning project can use."""

from .checkpoint_io import AtomicCheckpointIO
from .distributed import all_reduce_sum, gather, gather_uneven, rank, world_size
from .ema import EMACallback, EMAPair, ema_momentum
from .missing import missing_callbacks
from .optimizer_step import OptimizerStepCallback
from .queue import FeatureQueue, QueueCallback
from .step_seed import StepSeedCallback

__all__ = [
    "AtomicCheckpointIO",
    "EMACallback",
    "EMAPair",
    "FeatureQueue",
    "OptimizerStepCallback",
    "QueueCallback",
    "StepSeedCallback",
    "all_reduce_sum",
    "ema_momentum",
    "gather",
    "gather_uneven",
    "missing_callbacks",
    "rank",
    "world_size",
]
