"""The two checkpoints that every run keeps: the best by a retrieval metric, and the last."""

import difflib
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

DEFAULT_MONITOR = "val/recall_mean"


class BestCheckpoint(ModelCheckpoint):
    """Keep the checkpoint with the best value of one metric, as `best-step<N>.ckpt`.

    A module that does not log the default metric, or a run without validation, costs one warning and keeps no best
    checkpoint; `LastCheckpoint` goes on. A metric that was asked for by name and is not there stops the run.

    Args:
        monitor: Name of the logged metric to watch.
        mode: Whether a larger (`max`) or a smaller (`min`) value is better.
        save_top_k: How many to keep; -1 keeps all, 0 none.
        filename: Name without `.ckpt`; `{step}`, `{epoch}` and metric names are filled in.
        auto_insert_metric_name: Whether Lightning writes the names into the file name too; metric names hold a slash,
            which would become a folder.
        **kwargs: Everything else that `lightning.pytorch.callbacks.ModelCheckpoint` takes.

    Raises:
        MisconfigurationException: If a metric other than the default was named and is not logged.
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
        self._told = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save as Lightning does, if the metric is there."""
        if self._metric_is_there(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save as Lightning does, if the metric is there."""
        if trainer.sanity_checking or self._metric_is_there(trainer):
            super().on_validation_end(trainer, pl_module)

    def _metric_is_there(self, trainer: Trainer) -> bool:
        if self._every_n_epochs > 1 and (trainer.current_epoch + 1) % self._every_n_epochs:
            return True  # not an epoch that it saves in, nor perhaps one that the metric is measured in
        names = [str(name) for name in trainer.callback_metrics]
        if self.monitor is None or self.monitor in names or self._should_skip_saving_checkpoint(trainer):
            return True
        validated = trainer.fit_loop.epoch_loop.val_loop._has_run
        if not validated and trainer.enable_validation:
            return False  # the first validation of this run is still to come
        if self.monitor != DEFAULT_MONITOR and validated:
            nearest = difflib.get_close_matches(self.monitor, names, n=1, cutoff=0.0)
            raise MisconfigurationException(
                f"checkpoint.monitor is {self.monitor!r}, but the module logs no such metric; "
                + (f"the nearest that it logs is {nearest[0]!r}." if nearest else "it logs nothing.")
            )
        if not self._told:
            self._told = True
            rank_zero_warn(
                f"No metric {self.monitor!r} was logged, so only the last checkpoint is kept, not the best; name "
                "another metric with --checkpoint.monitor, or switch this off with --checkpoint.save_top_k 0."
            )
        return False


class LastCheckpoint(ModelCheckpoint):
    """Keep the latest checkpoint, as `last.ckpt`, after every validation.

    Lightning's `ModelCheckpoint(monitor=..., save_last=True)` writes `last.ckpt` only when the monitored metric has
    improved (2.6.6), so a run that is resumed from it falls back to its best epoch. This one needs no metric.

    Args:
        filename: Name without `.ckpt`; `--ckpt_path last` finds names that hold the word `last`.
        every_n_train_steps: Save after so many optimizer steps instead.
        every_n_epochs: Save after so many epochs.
        enable_version_counter: Whether to write `last-v1.ckpt` beside a `last.ckpt` that is already there.
        **kwargs: Everything else that `lightning.pytorch.callbacks.ModelCheckpoint` takes.
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
