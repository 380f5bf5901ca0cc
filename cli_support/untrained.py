"""A word about results of weights that nobody has trained."""

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from .report import tell


def tell_if_untrained(subcommand: str, module: LightningModule) -> None:
    """Warn where an evaluation without a checkpoint has only the weights that the module was built with.

    Modules that are not trained (they have no `training_step`) bring their weights, and those of this package say
    whether they evaluate the weights that were named.

    Args:
        subcommand: `validate`, `test` or `predict`.
        module: What is evaluated, without a checkpoint.
    """
    if not is_overridden("training_step", module):
        return
    evaluates_initial_weights = getattr(module, "evaluates_initial_weights", None)
    if callable(evaluates_initial_weights) and evaluates_initial_weights():
        return
    tell(
        f"{subcommand} was given no checkpoint, so {type(module).__name__} has the random weights that it was built "
        "with, and the results mean nothing: give --ckpt_path the checkpoint of a training, as in "
        "runs/<name>/version_<n>/checkpoints/last.ckpt."
    )
