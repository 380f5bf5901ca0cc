"""What changes during a run: the learning rate and the weight of the teacher's targets.

The learning rate is linear warm-up and a cosine by step, or the authors' staircase.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import Trainer

from ...common.errors import UserError
from ..optim.schedules import Schedule, WarmupCosine
from .settings import MomentumSettings, OptimSettings


def ramped_alpha(trainer: Trainer, momentum: MomentumSettings) -> float:
    """Return the weight of the soft targets: a linear ramp from 0 over the first epochs, batch by batch.

    Raises:
        UserError: If the training loader, and with it the ramp, has no length.
    """
    ramp = momentum.alpha_warmup_epochs * trainer.num_training_batches
    if ramp == float("inf"):
        raise UserError(
            "Expected a training loader with a length, over which alpha rises in the first epoch, got one without: "
            "set trainer.limit_train_batches to a number of batches, or model.momentum.alpha_warmup_epochs to 0."
        )
    batch = trainer.fit_loop.epoch_loop.total_batch_idx
    return momentum.alpha * (min(1.0, batch / ramp) if ramp else 1.0)


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
    """The schedule of the authors' code.

    In the first epoch the rate rises in steps of 100 iterations, set at the end of iterations 0, 100, 200 and so on;
    from the second epoch on it is a cosine of the epoch, constant within it, that would reach the floor one epoch after
    the end. A first epoch shorter than the warm-up cuts the warm-up off.

    Args:
        peak: learning rate after the warm-up.
        floor: limit of the cosine.
        warmup_steps: length of the warm-up, a multiple of 100 (2000 in pre-training, 100 in retrieval fine-tuning).
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
        epoch = index // max(total // self.epochs, 1)
        if epoch == 0:
            stairs = self.warmup_steps // 100
            stair = min(max(index - 1, 0) // 100, stairs)
            return self.warmup_start + stair * (self.peak - self.warmup_start) / stairs if stairs else self.peak
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * epoch / self.epochs)) / 2

    def warn(self, total: int) -> None:
        """Do nothing."""
