"""Learning-rate schedules as functions of the optimizer step or the epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from ...common.errors import UserError


def steps_of_run(trainer: Trainer) -> int:
    """Return the number of optimizer steps of the run.

    Args:
        trainer: trainer whose loaders exist; otherwise Lightning would drop their restored state.

    Raises:
        UserError: If only a time limit ends the run.
    """
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        raise UserError(
            "Expected a run of known length, which the learning-rate schedule depends on, got neither max_epochs nor "
            "max_steps: set trainer.max_steps or trainer.max_epochs too; trainer.max_time may still end the run first."
        )
    return int(steps)


class Schedule(Protocol):
    """A learning rate as a function of the optimizer step or of the epoch."""

    @property
    def peak(self) -> float:
        """Peak learning rate: the optimizer's rates are multiplied by `rate / peak`."""

    @property
    def interval(self) -> Literal["step", "epoch"]:
        """Unit that `rate` counts."""

    def rate(self, index: int, total: int) -> float:
        """Return the learning rate of a step or an epoch, from 0, in a run of `total` steps.

        A schedule by epoch gets 0 for `total`. The rate at step 0 is computed twice: before the length is known, for a
        very long run, and when training starts.
        """

    def warn(self, total: int) -> None:
        """Warn if the schedule does not fit into a run of `total` steps."""


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up, then half a cosine to the end of the run.

    Args:
        peak: learning rate after the warm-up.
        warmup_steps: length of the warm-up.
        floor: learning rate at the end of the run.
        constant_steps: first step of the cosine; the rate stays at the peak between warm-up and cosine.
        warmup_start: learning rate of step 0. None: the warm-up is open_clip's, whose step 0 has a rate above 0, and
            which is cut if the run is shorter; see `capped_warmup`.
        warmup_share: length of the warm-up as a share of the run's steps, in place of `warmup_steps`.
    """

    peak: float
    warmup_steps: int = 0
    floor: float = 0.0
    constant_steps: int = 0
    warmup_start: float | None = None
    warmup_share: float | None = None
    interval: Literal["step", "epoch"] = "step"

    def rate(self, index: int, total: int) -> float:
        """Return the learning rate of a step."""
        warmup = self._warmup(total)
        if index < warmup:
            return _rise(index, warmup, self.peak, self.warmup_start)
        start = max(warmup, self.constant_steps)
        if index < start:
            return self.peak
        progress = min((index - start) / max(total - start, 1), 1.0)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * progress)) / 2

    def warn(self, total: int) -> None:
        """Warn if the warm-up is cut, or if the run ends before the cosine starts."""
        if self.warmup_start is None and self.warmup_share is None:
            _warn_of_capped_warmup(self.warmup_steps, total)
        if self.constant_steps >= total:
            rank_zero_warn(
                f"constant_steps is {self.constant_steps}, but the run has {total} optimizer steps: the learning rate "
                "never falls; set model.optim.constant_steps."
            )

    def _warmup(self, total: int) -> int:
        if self.warmup_share is not None:
            return int(self.warmup_share * total)
        return capped_warmup(self.warmup_steps, total) if self.warmup_start is None else self.warmup_steps


@dataclass(frozen=True)
class WarmupLinear:
    """Linear warm-up in steps, cut if the run is shorter, then linear decay to 0, as in ClipCap.

    Args:
        peak: learning rate at the end of the warm-up.
        warmup_steps: length of the warm-up; see `capped_warmup`.
    """

    peak: float
    warmup_steps: int
    interval: Literal["step", "epoch"] = "step"

    def rate(self, index: int, total: int) -> float:
        """Return the learning rate of a step."""
        warmup = capped_warmup(self.warmup_steps, total)
        if index < warmup:
            return _rise(index, warmup, self.peak, None)
        return self.peak * max(total - index, 0) / max(total - warmup, 1)

    def warn(self, total: int) -> None:
        """Warn if the warm-up is cut."""
        _warn_of_capped_warmup(self.warmup_steps, total)


@dataclass(frozen=True)
class Milestones:
    """A learning rate that is multiplied by a factor after each of some epochs.

    Args:
        peak: learning rate of the first epoch.
        milestones: numbers of complete epochs after which the learning rate decays.
        decay: multiplicative learning-rate decay.
    """

    peak: float
    milestones: Sequence[int]
    decay: float
    interval: Literal["step", "epoch"] = "epoch"

    def rate(self, index: int, total: int) -> float:
        """Return the learning rate of an epoch."""
        passed = sum(index >= milestone for milestone in self.milestones)
        return self.peak * float(self.decay**passed)

    def warn(self, total: int) -> None:
        """Do nothing: milestones after the end are not reached."""


def capped_warmup(warmup_steps: int, total: int) -> int:
    """Return the length of a warm-up that ends before the run does.

    Args:
        warmup_steps: requested length.
        total: steps of the whole run.

    Returns:
        The requested length, or a tenth of the run if the run is not longer than that.
    """
    return warmup_steps if warmup_steps < total else total // 10


def _rise(step: int, warmup: int, peak: float, start: float | None) -> float:
    """Return the rate in a linear warm-up from `start` at step 0, or from 0 one step before if that is None."""
    if start is None:
        return float(peak * (step + 1) / warmup)
    return start + (peak - start) * step / warmup


def _warn_of_capped_warmup(warmup_steps: int, total: int) -> None:
    used = capped_warmup(warmup_steps, total)
    if used != warmup_steps:
        rank_zero_warn(
            f"warmup_steps is {warmup_steps}, but the run has {total} optimizer steps: the warm-up takes {used}; set "
            "model.optim.warmup_steps."
        )
