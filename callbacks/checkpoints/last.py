"""The latest checkpoint of a run."""

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """Keep the latest checkpoint, as `last.ckpt`, after every validation.

    Lightning's `ModelCheckpoint(monitor=..., save_last=True)` writes `last.ckpt` only when the monitored metric has
    improved (2.6.6), so a run that is resumed from it falls back to its best epoch. This one needs no metric.

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
