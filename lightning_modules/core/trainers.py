"""Trainer, datamodule and callbacks of a module, also outside a run."""

from typing import Any

from lightning import LightningModule
from lightning.pytorch import Callback, Trainer


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the trainer that a module is attached to; None outside a run."""
    try:
        trainer = module.trainer
        getattr(trainer, "state", None)  # the module has a weak reference, and the trainer may be gone
    except (RuntimeError, ReferenceError):
        return None
    return trainer


def datamodule_of(module: LightningModule) -> Any | None:
    """Return the datamodule of the run; None outside a run, or if the run has loaders only."""
    return getattr(trainer_of(module), "datamodule", None)


def callbacks_of(module: LightningModule) -> list[Callback]:
    """Return the callbacks of the run; none outside a run."""
    return list(getattr(trainer_of(module), "callbacks", []))


def convert_before_restore(module: LightningModule) -> None:
    """Convert a module to float64 in a run of the precision `64-true`.

    Lightning (2.6.6) restores a checkpoint before it converts the module, and so rounds the weights to float32. Half
    precisions lose nothing in that order.
    """
    trainer = trainer_of(module)
    if trainer is not None and trainer.precision == "64-true":
        module.double()
