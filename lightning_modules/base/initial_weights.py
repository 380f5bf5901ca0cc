"""State of a module's initial weights, which are loaded once and do not replace a checkpoint's weights."""

from dataclasses import dataclass
from typing import Any

from lightning import LightningModule

from ...common.errors import UserError
from ..core.trainers import callbacks_of, trainer_of


@dataclass
class InitialState:
    """State of a module's weights before its first step.

    Attributes:
        loaded: whether the weights are final: those of a checkpoint, or the initial ones.
        restored: whether the weights are those of a checkpoint.
        awaits_checkpoint: whether a checkpoint will be restored after `setup`.
        preprocessing: image preprocessing of the weights, in the form of `preprocessing.py`.
    """

    loaded: bool = False
    restored: bool = False
    awaits_checkpoint: bool = False
    preprocessing: dict[str, Any] | None = None


def restores_after_setup(module: LightningModule) -> bool:
    """Return whether the strategy restores checkpoints after it has sharded the module."""
    trainer = trainer_of(module)
    return trainer is not None and trainer.strategy.restore_checkpoint_after_setup


def check_one_source(module: LightningModule, weights: str | None) -> None:
    """Check that no callback replaces the initial weights of a module.

    Such a callback has the attribute `replaces_initial_weights = True`.

    Raises:
        UserError: If there are two sources of initial weights.
    """
    if weights is None:
        return
    for callback in callbacks_of(module):
        if getattr(callback, "replaces_initial_weights", False):
            raise UserError(
                f"Expected one source of initial weights, got weights {weights!r} beside a {type(callback).__name__}: "
                "remove one of them."
            )
