"""Start of a run: the state of the initial weights, and options of the Trainer that are refused before training."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateFinder, WeightAveraging

from ...common.errors import UserError
from ...common.private_api import averaged_model
from ..core.trainers import callbacks_of, trainer_of


@dataclass
class InitialState:
    """State of a module's weights before its first step.

    Attributes:
        loaded: whether the weights are final: those of a checkpoint, or the initial ones.
        restored: whether the weights are those of a checkpoint.
        awaits_checkpoint: whether a checkpoint will be restored after `setup`.
        preprocessing: image preprocessing of the weights, as a record (`common/preprocessing.py`).
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


def check_precision(module: LightningModule, stage: str) -> None:
    """Refuse a precision of the Trainer in which a method would not learn, before data or weights are loaded.

    `16-true` has no loss scale. `bf16-true` rounds a moving average to 8 bits, so that its updates, which are smaller
    by the factor 1 - momentum, change nothing. Both are allowed in evaluation. TransformerEngine replaces layers, and
    with them the names of weights in checkpoints and exports.

    Args:
        module: The method.
        stage: The Trainer's stage, as in `setup`.

    Raises:
        UserError: If the precision is refused.
    """
    precision = getattr(trainer_of(module), "precision", "32-true")
    name = type(module).__name__
    if precision.startswith("transformer-engine"):
        raise UserError(
            f"Expected layers of torch in {name}, got trainer.precision {precision}, which replaces them and the names "
            "of their weights: use bf16-mixed."
        )
    if stage != "fit":
        return
    if precision == "16-true":
        raise UserError(
            f"Expected a precision with a loss scale, or the range of float32, to train {name}, got trainer.precision "
            "16-true, in which small gradients are zero: use bf16-mixed or 16-mixed."
        )
    if precision == "bf16-true" and getattr(module, "momentum_pairs", dict)():
        raise UserError(
            f"Expected a moving average in float32 to train {name}, got trainer.precision bf16-true, which rounds its "
            "updates away: use bf16-mixed."
        )


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
    count = len(list(module.parameters()))
    for callback in callbacks_of(module):
        if isinstance(callback, WeightAveraging) and len(list(averaged_model(callback).module.parameters())) != count:
            raise UserError(
                f"Expected EMACallback with a {type(module).__name__} that loads a frozen network, got Lightning's "
                f"{type(callback).__name__}, which copied the module before: use EMACallback."
            )
