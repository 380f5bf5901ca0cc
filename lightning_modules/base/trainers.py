"""Trainer, datamodule and callbacks of a module, also outside a run."""

from typing import Any

from lightning import LightningModule
from lightning.pytorch import Callback, Trainer


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the trainer that a module is attached to; None outside a run."""
    try:
        return module.trainer
    except RuntimeError:
        return None


def datamodule_of(module: LightningModule) -> Any | None:
    """Return the datamodule of the run; None outside a run, or if the run has loaders only."""
    return getattr(trainer_of(module), "datamodule", None)


def callbacks_of(module: LightningModule) -> list[Callback]:
    """Return the callbacks of the run; none outside a run."""
    return list(getattr(trainer_of(module), "callbacks", []))
