"""Learning-rate schedules as functions of the optimizer step or the epoch."""

import math
from collections.abc import Iterable, Sequence
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


def warmup_cosine(step: int, total: int, peak: float, floor: float, warmup_steps: int, warmup_start: float) -> float:
    """Return the learning rate of a linear warm-up and half a cosine.

    Args:
        step: optimizer step, from 0.
        total: steps of the whole run.
        peak: learning rate at the end of the warm-up.
        floor: learning rate at the end of the run.
        warmup_steps: length of the warm-up.
        warmup_start: learning rate at step 0 of the warm-up.

    Returns:
        The learning rate for that step.
    """
    if step < warmup_steps:
        return warmup_start + (peak - warmup_start) * step / warmup_steps
    progress = min((step - warmup_steps) / max(total - warmup_steps, 1), 1.0)
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def warmup_linear(step: int, total: int, peak: float, warmup_steps: int) -> float:
    """Return the learning rate of a linear warm-up and a linear decay to 0.

    Args:
        step: optimizer step, from 0.
        total: steps of the whole run.
        peak: learning rate at the end of the warm-up.
        warmup_steps: length of the warm-up; the first of its steps has a rate above 0.

    Returns:
        The learning rate for that step.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * max(total - step, 0) / max(total - warmup_steps, 1)


def after_milestones(epoch: int, milestones: Iterable[int], decay: float) -> float:
    """Return the factor of the learning rate after the passed milestones.

    Args:
        epoch: counted from 0.
        milestones: numbers of complete epochs after which the learning rate decays.
        decay: multiplicative learning-rate decay.

    Returns:
        The factor for that epoch.
    """
    return float(decay ** sum(epoch >= milestone for milestone in milestones))


def capped_warmup(warmup_steps: int, total: int) -> int:
    """Return the length of a warm-up that ends before the run does.

    Args:
        warmup_steps: requested length.
        total: steps of the whole run.

    Returns:
        The requested length, or a tenth of the run if the run is not longer than that.
    """
    return warmup_steps if warmup_steps < total else total // 10


def capped_warmup_cosine(
    step: int, total: int, peak: float, warmup_steps: int, floor: float = 0.0, constant_steps: int = 0
) -> float:
    """Return the learning rate of `warmup_cosine` with a capped warm-up and a first step above 0, as in open_clip.

    Args:
        step: optimizer step, from 0.
        total: steps of the whole run.
        peak: learning rate at the end of the warm-up.
        warmup_steps: requested length; see `capped_warmup`.
        floor: learning rate at the end of the run.
        constant_steps: first step of the cosine; the rate stays at the peak between warm-up and cosine.

    Returns:
        The learning rate for that step.
    """
    warmup = capped_warmup(warmup_steps, total)
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    start = max(warmup, constant_steps)
    if step < start:
        return peak
    return warmup_cosine(step - start, total - start, peak, floor, 0, peak)


def warn_of_capped_warmup(warmup_steps: int, total: int) -> None:
    """Warn if a warm-up is cut.

    Args:
        warmup_steps: requested length.
        total: steps of the whole run.
    """
    used = capped_warmup(warmup_steps, total)
    if used != warmup_steps:
        rank_zero_warn(
            f"warmup_steps is {warmup_steps}, but the run has {total} optimizer steps: the warm-up takes {used}; set "
            "model.optim.warmup_steps."
        )


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
    """Linear warm-up in steps, cut if the run is shorter, then half a cosine, as in open_clip.

    Args:
        peak: learning rate at the end of the warm-up.
        warmup_steps: length of the warm-up; see `capped_warmup`.
        floor: learning rate at the end of the run.
        constant_steps: first step of the cosine; the rate stays at the peak between warm-up and cosine.
    """

    peak: float
    warmup_steps: int
    floor: float = 0.0
    constant_steps: int = 0
    interval: Literal["step", "epoch"] = "step"

    def rate(self, index: int, total: int) -> float:
        """Return the learning rate of a step."""
        return capped_warmup_cosine(index, total, self.peak, self.warmup_steps, self.floor, self.constant_steps)

    def warn(self, total: int) -> None:
        """Warn if the warm-up is cut, or if the run ends before the cosine starts."""
        warn_of_capped_warmup(self.warmup_steps, total)
        if self.constant_steps >= total:
            rank_zero_warn(
                f"constant_steps is {self.constant_steps}, but the run has {total} optimizer steps: the learning rate "
                "never falls; set model.optim.constant_steps."
            )


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
        return warmup_linear(index, total, self.peak, capped_warmup(self.warmup_steps, total))

    def warn(self, total: int) -> None:
        """Warn if the warm-up is cut."""
        warn_of_capped_warmup(self.warmup_steps, total)


@dataclass(frozen=True)
class WarmupShareCosine:
    """Warm-up from 0 over a share of the run, then half a cosine to 0.

    Args:
        peak: learning rate at the end of the warm-up.
        warmup_share: share of the run's steps.
    """

    peak: float
    warmup_share: float
    interval: Literal["step", "epoch"] = "step"

    def rate(self, index: int, total: int) -> float:
        """Return the learning rate of a step."""
        return warmup_cosine(index, total, self.peak, 0.0, int(self.warmup_share * total), 0.0)

    def warn(self, total: int) -> None:
        """Do nothing: a share of the run fits into it."""


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
        return self.peak * after_milestones(index, self.milestones, self.decay)

    def warn(self, total: int) -> None:
        """Do nothing: milestones after the end are not reached."""
