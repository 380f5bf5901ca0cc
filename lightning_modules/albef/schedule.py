"""Learning-rate schedules (linear warm-up and cosine by step, or the authors' staircase) and weight-decay groups."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import nn

from ...common.errors import UserError
from ..optim.schedules import Schedule, WarmupCosine
from .settings import OptimSettings


def with_decay(groups: list[dict[str, Any]], parameter: nn.Parameter) -> list[dict[str, Any]]:
    """Move a parameter from the second group, without weight decay, to the first, with weight decay."""
    decayed, plain = groups
    rest = [each for each in plain["params"] if each is not parameter]
    return [decayed | {"params": [parameter, *decayed["params"]]}, plain | {"params": rest}]


def paper_schedule(optim: OptimSettings, trainer: Trainer | None) -> Schedule:
    """Return the schedule of the settings.

    Raises:
        UserError: If the authors' schedule is used in a run that does not count epochs.
    """
    peak = optim.learning_rate
    floor = optim.min_learning_rate
    start = optim.warmup_learning_rate
    if optim.lr_schedule == "cosine":
        return WarmupCosine(peak, optim.warmup_steps, floor, warmup_start=start)
    epochs = None if trainer is None else trainer.max_epochs
    if epochs is None or epochs < 1:
        raise UserError(
            "Expected a run that counts epochs for model.optim.lr_schedule official, got none: set trainer.max_epochs."
        )
    return Staircase(peak, floor, optim.warmup_steps, start, epochs)


@dataclass(frozen=True)
class Staircase:
    """The schedule of the authors' code; see `official_lr`.

    Args:
        peak: learning rate after the warm-up.
        floor: limit of the cosine.
        warmup_steps: length of the warm-up.
        warmup_start: learning rate of the first iterations.
        epochs: epochs of the whole run.
    """

    peak: float
    floor: float
    warmup_steps: int
    warmup_start: float
    epochs: int
    interval: Literal["step", "epoch"] = "step"

    def rate(self, index: int, total: int) -> float:
        """Return the learning rate of a step."""
        steps_per_epoch = max(total // self.epochs, 1)
        return official_lr(
            index, steps_per_epoch, self.epochs, self.peak, self.floor, self.warmup_steps, self.warmup_start
        )

    def warn(self, total: int) -> None:
        """Do nothing."""


def official_lr(
    step: int, steps_per_epoch: int, epochs: int, peak: float, floor: float, warmup_steps: int, warmup_start: float
) -> float:
    """Return the learning rate of the authors' code at one iteration.

    In the first epoch the rate rises in steps of 100 iterations, set at the end of iterations 0, 100, 200 and so on;
    from the second epoch on it is a cosine of the epoch, constant within it, that would reach the floor one epoch after
    the end. A first epoch shorter than the warm-up cuts the warm-up off.

    Args:
        step: optimizer step, from 0.
        steps_per_epoch: optimizer steps in an epoch.
        epochs: epochs of the whole run.
        peak: learning rate after the warm-up.
        floor: limit of the cosine.
        warmup_steps: length of the warm-up, a multiple of 100 (2000 in pre-training, 100 in retrieval fine-tuning).
        warmup_start: learning rate of the first iterations.
    """
    epoch = step // steps_per_epoch
    if epoch == 0:
        stairs = warmup_steps // 100
        stair = min(max(step - 1, 0) // 100, stairs)
        return warmup_start + stair * (peak - warmup_start) / stairs if stairs else peak
    return floor + (peak - floor) * (1 + math.cos(math.pi * epoch / epochs)) / 2
