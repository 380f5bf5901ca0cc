"""Gradient clipping for optimizers that unscale gradients by themselves, such as fused AdamW."""

from lightning import Trainer
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer


def clip_unscaled(trainer: Trainer, optimizer: Optimizer, clip_val: int | float | None, algorithm: str | None) -> bool:
    """Clip the gradients of an optimizer that divides them by the loss scale in its own step.

    Lightning refuses to clip such gradients, because they would be clipped before the division. Here the gradients are
    divided first, and `GradScaler.step` makes the optimizer skip its own division. The optimizer skips a step with
    infinite gradients by itself, so the host does not wait. Without a loss scale (bf16-mixed) there is no division.

    Args:
        trainer: trainer of the run.
        optimizer: optimizer of the clipped gradients.
        clip_val: the Trainer's `gradient_clip_val`.
        algorithm: the Trainer's `gradient_clip_algorithm`.

    Returns:
        Whether the optimizer is of this kind; otherwise Lightning clips.
    """
    plugin = trainer.precision_plugin
    if not clip_val or not isinstance(plugin, MixedPrecision) or not _optimizer_handles_unscaling(optimizer):
        return False
    if plugin.scaler is not None:
        plugin.scaler.unscale_(optimizer)
    # The method of MixedPrecision refuses.
    Precision.clip_gradients(plugin, optimizer, clip_val, GradClipAlgorithmType(algorithm or "norm"))
    return True
