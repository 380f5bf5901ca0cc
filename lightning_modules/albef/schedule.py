"""Learning rates: linear warm-up and cosine by step, or the authors' staircase."""

import math
from collections.abc import Mapping
from typing import Any

from ..optim.schedules import warmup_cosine


def learning_rate(step: int, total_steps: int, epochs: int | None, settings: Mapping[str, Any]) -> float:
    """Learning rate of an optimizer step, by the arguments of `ALBEFModule`.

    Args:
        step: optimizer step, from 0.
        total_steps: of the whole run; not used at step 0.
        epochs: of the whole run; used by the authors' schedule, but not at step 0.
        settings: the arguments that name the schedule and its rates.

    Raises:
        ValueError: if the authors' schedule is asked for in a run that does not count epochs.
    """
    names = ("learning_rate", "min_learning_rate", "warmup_learning_rate", "warmup_steps")
    peak, floor, start, warmup = (settings[name] for name in names)
    if step == 0:
        return start if warmup else peak
    if settings["lr_schedule"] == "cosine":
        return warmup_cosine(step, total_steps, peak, floor, warmup, start)
    if epochs is None or epochs < 1:
        raise ValueError("The official learning-rate schedule counts epochs: set trainer.max_epochs.")
    return official_lr(step, max(total_steps // epochs, 1), epochs, peak, floor, warmup, start)


def official_lr(
    step: int, steps_per_epoch: int, epochs: int, peak: float, floor: float, warmup_steps: int, warmup_start: float
) -> float:
    """Learning rate of the ALBEF repository at one iteration.

    In the first epoch the rate rises in steps of 100 iterations, set at the end of iterations 0, 100, 200 and so on;
    from the second epoch on it is a cosine of the epoch, constant inside it, that would reach the floor one epoch after
    the end.
    A first epoch shorter than the warm-up cuts the warm-up off.

    Args:
        step: optimizer step, from 0.
        steps_per_epoch: optimizer steps in an epoch.
        epochs: epochs of the whole run.
        peak: learning rate after the warm-up.
        floor: learning rate that the cosine tends to.
        warmup_steps: length of the warm-up, a multiple of 100 (2000 in pre-training, 100 in retrieval fine-tuning).
        warmup_start: learning rate of the first iterations.
    """
    epoch = step // steps_per_epoch
    if epoch == 0:
        stairs = warmup_steps // 100
        stair = min(max(step - 1, 0) // 100, stairs)
        return warmup_start + stair * (peak - warmup_start) / stairs if stairs else peak
    return floor + (peak - floor) * (1 + math.cos(math.pi * epoch / epochs)) / 2
