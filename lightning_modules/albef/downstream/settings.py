"""Settings of the downstream tasks: those of pre-training with the defaults of the authors' configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ....common.ranges import COUNT, SettingsGroup
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


@dataclass(frozen=True)
class VQAOptimSettings(TaskOptimSettings):
    """AdamW and its learning rate in visual question answering; see `OptimSettings`."""

    warmup_steps: int = 400


@dataclass(frozen=True)
class AnswerSettings(SettingsGroup, option="answers"):
    """How a question is answered (section 5, and the authors' code).

    Args:
        how: "rank" ranks the data's list of answers, "generate" writes an answer by beam search; without a list,
            answers are always written.
        candidates: answers of the list that remain after the first token is scored.
        first_token_twice: whether the log-probability of the first token counts twice, as in the authors' code.
        block: tokens of answers that are scored at a time. At the paper's sizes a block of 4096 takes 1.0 GB for the
            head and 0.2 GB for the decoder's layers.
        beams: beams of the search.
        max_tokens: longest written answer in tokens, its end included.
        top: number of best answers that are reported with their probabilities.
    """

    how: Literal["rank", "generate"] = "rank"
    candidates: Annotated[int, COUNT] = 128
    first_token_twice: bool = False
    block: Annotated[int, COUNT] = 4096
    beams: Annotated[int, COUNT] = 3
    max_tokens: Annotated[int, COUNT] = 10
    top: Annotated[int, COUNT] = 5
