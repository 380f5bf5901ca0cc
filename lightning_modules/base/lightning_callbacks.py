"""Callbacks of Lightning's own that a method cannot serve are refused before training instead of failing in it."""

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateFinder, WeightAveraging

from ...callbacks.private_api import averaged_module
from ...common.errors import UserError
from ..core.trainers import callbacks_of


def refuse_rate_finder(module: LightningModule) -> None:
    """Refuse `LearningRateFinder`, whose rate the method's schedule would replace after the first step.

    Raises:
        UserError: If the module's Trainer has one.
    """
    if any(isinstance(callback, LearningRateFinder) for callback in callbacks_of(module)):
        raise UserError(
            "Expected a learning rate from the model's options, got Lightning's LearningRateFinder, whose rate the "
            "schedule would replace after one step: leave it out, and compare short runs with several "
            "model.optim.learning_rate."
        )


def refuse_stale_averages(module: LightningModule) -> None:
    """Refuse Lightning's weight averaging if networks were added to the module after the callback copied it.

    Lightning sets callbacks up before the module, and the method loads its frozen networks when it is set up.

    Raises:
        UserError: If a copy has another number of parameters than the module.
    """
    own = len(list(module.parameters()))
    for callback in callbacks_of(module):
        if isinstance(callback, WeightAveraging) and len(list(averaged_module(callback).parameters())) != own:
            raise UserError(
                f"Expected EMACallback with a {type(module).__name__} that loads a frozen network, got Lightning's "
                f"{type(callback).__name__}, which copied the module before: use EMACallback."
            )
