"""The checkpoints of every run, the best by a metric and the latest; and what their restore must not undo."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ...common.errors import UserError
from ...common.files import link_or_copy
from ...common.names import did_you_mean
from ...common.private_api import save_if_new

DEFAULT_MONITOR = "val/recall_mean"


class BestCheckpoint(ModelCheckpoint):
    """Keep the checkpoint with the best value of one metric, as `best-step<N>.ckpt`.

    If the module does not log the default metric, or the run has no validation, warn once and keep no best checkpoint;
    `LastCheckpoint` is unaffected. A metric that was asked for by name and is not logged stops the run.

    A run that resumes in another folder keeps the best checkpoints of its earlier part, as the uninterrupted run would:
    its first checkpoint puts links to them, or copies, into the new folder. (Lightning 2.6.6 forgets their values.)

    Args:
        monitor: Name of the logged metric to watch.
        mode: Whether a larger (`max`) or a smaller (`min`) value is better.
        save_top_k: Number of checkpoints to keep; -1 keeps all, 0 none.
        filename: Name without `.ckpt`; `{step}`, `{epoch}` and metric names are filled in.
        auto_insert_metric_name: Whether Lightning writes the names into the file name too; metric names hold a slash,
            which would become a folder.
        **kwargs: Other arguments of `lightning.pytorch.callbacks.ModelCheckpoint`.

    Raises:
        UserError: If a metric other than the default was named and is not logged.
    """

    def __init__(
        self,
        monitor: str | None = DEFAULT_MONITOR,
        mode: str = "max",
        save_top_k: int = 1,
        filename: str | None = "best-step{step}",
        auto_insert_metric_name: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            filename=filename,
            auto_insert_metric_name=auto_insert_metric_name,
            **kwargs,
        )
        self._warned = False
        self._has_validated = False  # in this fit
        self._earlier: dict[str, Path] = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Move the paths in the state to the folder of this run, and keep no more of them than this run keeps."""
        state = checkpoint["callbacks"].get(self.state_key)
        if trainer.state.fn != "fit" or not state:
            return
        resumed_from = Path(trainer.ckpt_path or "")
        scores: dict[str, Tensor] = state["best_k_models"]
        files: dict[str, Path | None] = {}
        for path in scores:
            candidates = (resumed_from.with_name(Path(path).name), Path(path))
            files[path] = next((file for file in candidates if file.exists()), None)
        files = trainer.strategy.broadcast(files)
        kept = sorted((path for path in scores if files[path]), key=scores.__getitem__, reverse=self.mode == "max")
        if self.save_top_k >= 0:
            kept = kept[: self.save_top_k]
        if missing := [path for path in scores if files[path] is None]:
            rank_zero_warn(
                f"Expected the best checkpoint of the run's earlier part, {missing[0]!r}, got none: the best is chosen "
                "among those that are left and the new ones."
            )
        targets = {path: str(Path(str(self.dirpath), Path(path).name)) for path in scores if path in kept}
        self._earlier = {
            target: file for path, target in targets.items() if (file := files[path]) and file != Path(target)
        }
        worst = (min if self.mode == "max" else max)(kept, key=scores.__getitem__, default="")
        checkpoint["callbacks"][self.state_key] = state | {
            "dirpath": self.dirpath,
            "best_k_models": {target: scores[path] for path, target in targets.items()},
            "best_model_path": targets[kept[0]] if kept else "",
            "best_model_score": scores[kept[0]] if kept else None,
            "kth_best_model_path": targets.get(worst, ""),
            "kth_value": scores.get(worst, self.kth_value),
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the best checkpoints of the earlier part of the run beside the first checkpoint of this part."""
        if trainer.state.fn != "fit":
            return
        for target, file in self._earlier.items():
            if trainer.is_global_zero and target in self.best_k_models and file.exists():
                link_or_copy(file, Path(target))
        self._earlier = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save as Lightning does, if the metric was logged."""
        if self._metric_is_logged(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save as Lightning does, if the metric was logged."""
        self._has_validated |= trainer.state.fn == "fit" and not trainer.sanity_checking
        if trainer.sanity_checking or self._metric_is_logged(trainer):
            super().on_validation_end(trainer, pl_module)

    def _metric_is_logged(self, trainer: Trainer) -> bool:
        names = [str(name) for name in trainer.callback_metrics]
        if self.monitor is None or self.monitor in names or not self._saves_in_this_epoch(trainer):
            return True
        if not self._has_validated and trainer.enable_validation:
            return False  # the first validation of this run is still to come
        if self.monitor != DEFAULT_MONITOR and self._has_validated:
            raise UserError(
                f"Expected a metric that the module logs as checkpoint.monitor, got {self.monitor!r}: "
                f"{did_you_mean(self.monitor, names)}"
            )
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"No metric {self.monitor!r} was logged, so only the last checkpoint is kept, not the best; name "
                "another metric with --checkpoint.monitor, or switch this off with --checkpoint.save_top_k 0."
            )
        return False

    def _saves_in_this_epoch(self, trainer: Trainer) -> bool:
        if trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return False
        every = max(self.every_n_epochs or 1, 1)
        return (trainer.current_epoch + 1) % every == 0


class LastCheckpoint(ModelCheckpoint):
    """Keep the latest checkpoint, as `last.ckpt`, after every epoch and at the end of the training.

    Lightning's `ModelCheckpoint(monitor=..., save_last=True)` writes `last.ckpt` only when the monitored metric has
    improved (2.6.6), so a run that is resumed from it falls back to its best epoch. This one needs no metric.

    The end of a training is saved whatever the interval, also if `max_steps`, `max_time` or early stopping ends it in
    mid-epoch.

    Args:
        filename: Name without `.ckpt`; `--ckpt_path last` finds names that hold the word `last`.
        every_n_train_steps: Save after so many optimizer steps instead.
        every_n_epochs: Save after so many epochs.
        enable_version_counter: Whether to write `last-v1.ckpt` beside an existing `last.ckpt`.
        **kwargs: Other arguments of `lightning.pytorch.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        filename: str | None = "last",
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        enable_version_counter: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filename=filename,
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            enable_version_counter=enable_version_counter,
            **kwargs,
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save as Lightning does, and at the end of the training.

        Lightning calls this hook also for an epoch that ends early. `on_train_end` would be too late: weight averaging
        exchanges the weights there.
        """
        super().on_train_epoch_end(trainer, pl_module)
        if _ends_after_epoch(trainer):
            save_if_new(self, trainer)


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


def _ends_after_epoch(trainer: Trainer) -> bool:
    """Return whether a training ends after the epoch that ends now, as Lightning (2.6.6) decides it.

    The public `fit_loop.done` changes the loop's progress.
    """
    epochs: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    steps_reached = 0 <= trainer.max_steps <= trainer.global_step
    epochs_reached = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epochs
    can_stop = epochs >= (trainer.min_epochs or 0) and trainer.global_step >= (trainer.min_steps or 0)
    return steps_reached or epochs_reached or (trainer.should_stop and can_stop)
