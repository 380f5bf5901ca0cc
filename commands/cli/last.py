"""The latest checkpoint of a run."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ...common.private_api import ends_after_epoch, save_if_new


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
        if ends_after_epoch(trainer):
            save_if_new(self, trainer)
