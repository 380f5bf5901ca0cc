"""Optimizer settings that were typed on resume, set again after Lightning has restored those of the checkpoint."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class TypedOptimizerOptions(Callback):
    """Let a learning rate, weight decay or beta that was typed on resume override the optimizer state.

    An optimizer's state holds its settings, and a scheduler's state the base learning rates, so restoring them undoes
    a typed learning rate although the module was built with it. This callback copies the settings of the new optimizer
    at `on_fit_start`, before the restore, and sets them again at `on_train_start`, after it; the schedule's current
    factor is applied to the new base rate. Moments and step counts stay those of the checkpoint.
    """

    def __init__(self) -> None:
        self._fresh: list[list[dict[str, Any]]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the settings of the new optimizers."""
        self._fresh = [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set them again."""
        for optimizer, fresh_groups in zip(trainer.optimizers, self._fresh, strict=True):
            for group, fresh in zip(optimizer.param_groups, fresh_groups, strict=True):
                old_base = group.get("initial_lr", group["lr"])
                new_base = fresh.get("initial_lr", fresh["lr"])
                factor = group["lr"] / old_base if old_base else 1.0
                group.update(fresh)
                group["lr"] = new_base * factor
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [
                    group.get("initial_lr", group["lr"]) for group in scheduler.optimizer.param_groups
                ]
