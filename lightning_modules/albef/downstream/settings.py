"""Settings of the downstream tasks: those of pre-training with the defaults of the authors' configs."""

from dataclasses import dataclass
from typing import Literal

from ..settings import MomentumSettings, OptimSettings, VisionSettings


@dataclass(frozen=True)
class TaskVisionSettings(VisionSettings):
    """The image encoder, at 384 pixels (section 5); see `VisionSettings`."""

    image_size: int = 384


@dataclass(frozen=True)
class TaskMomentumSettings(MomentumSettings):
    """The momentum teacher of a task and its soft targets; see `MomentumSettings`.

    Args:
        distill: whether there are a teacher and soft targets. False builds no teacher.
        start: "weights" starts the teacher from the loaded weights; "random" starts it, where the loaded weights have
            no teacher, from the random weights before them, averaged once with the loaded ones, as the authors'
            fine-tuning for NLVR2 does.
    """

    distill: bool = True
    start: Literal["weights", "random"] = "weights"


@dataclass(frozen=True)
class EntailmentMomentumSettings(TaskMomentumSettings):
    """The momentum teacher of visual entailment, whose alpha is constant; see `TaskMomentumSettings`."""

    alpha_warmup_epochs: float = 0.0


@dataclass(frozen=True)
class TaskOptimSettings(OptimSettings):
    """AdamW and its learning rate; see `OptimSettings`. `decay_temperature` has no effect."""

    learning_rate: float = 2e-5
    min_learning_rate: float = 1e-6
    warmup_steps: int = 100


@dataclass(frozen=True)
class AssignmentOptimSettings(TaskOptimSettings):
    """AdamW and its learning rate in text assignment; see `OptimSettings`."""

    min_learning_rate: float = 1e-5
