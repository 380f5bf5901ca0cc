"""An optimizer with its schedule, as `configure_optimizers` returns them."""

from collections.abc import Callable, Iterable
from typing import Any

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ...common.errors import UserError
from .schedules import Schedule, steps_of_run

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
"""The types of `lightning.pytorch.cli`, whose import requires jsonargparse."""
_LONG_RUN = 2**62  # steps


def with_schedule(module: LightningModule, optimizer: Optimizer, schedule: Schedule) -> OptimizerLRScheduler:
    """Return an optimizer whose learning rates follow a schedule.

    The schedule is a factor of the optimizer's own rates, so changing these on resume takes effect.

    Args:
        module: module of the run.
        optimizer: optimizer whose groups have the learning rates at the schedule's peak.
        schedule: schedule of the learning rate.

    Raises:
        UserError: If the rate at the peak is 0.
    """
    if schedule.peak == 0:
        raise UserError(
            "Expected a positive learning rate, got 0, which trains nothing: set model.optim.learning_rate, or use "
            "vlightning validate."
        )

    def factor(index: int) -> float:
        if schedule.interval == "epoch":
            total = 0
        elif index == 0:
            # Reading the length would build the loaders before a checkpoint is restored. `start_schedule` reads it.
            total = _LONG_RUN
        else:
            total = steps_of_run(module.trainer)
        return schedule.rate(index, total) / schedule.peak

    scheduler = LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": schedule.interval}}


def with_scheduler(optimizer: Optimizer, make: LRSchedulerCallable) -> OptimizerLRScheduler:
    """Return an optimizer with a scheduler of torch that steps after each optimizer step.

    `ReduceLROnPlateau`, which monitors a metric, steps after each epoch.
    """
    scheduler = make(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        monitor: Any = getattr(scheduler, "monitor", None)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def start_schedule(module: LightningModule, schedule: Schedule) -> None:
    """Set the learning rate of the first step, which depends on the length of the run; for `on_train_start`.

    Raises:
        UserError: If the schedule counts steps and the length of the run is unknown.
    """
    if schedule.interval == "epoch":
        return
    total = steps_of_run(module.trainer)
    schedule.warn(total)
    for config in module.trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        if isinstance(scheduler, LambdaLR) and scheduler.last_epoch == 0:  # otherwise restored
            for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = base * schedule.rate(0, total) / schedule.peak
