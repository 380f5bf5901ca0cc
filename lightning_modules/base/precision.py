"""The precisions of the Trainer that a method is trained and evaluated in."""

from lightning import LightningModule

from ...common.errors import UserError
from ..core.trainers import trainer_of


def check_precision(module: LightningModule, stage: str) -> None:
    """Refuse a precision of the Trainer in which a method would not learn, before data or weights are loaded.

    `16-true` has no loss scale. `bf16-true` rounds a moving average to 8 bits, so that its updates, which are smaller
    by the factor 1 - momentum, change nothing. TransformerEngine replaces layers, and with them the names of weights in
    checkpoints and exports. Evaluation needs none of the first two.

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
