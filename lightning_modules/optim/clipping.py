"""Gradient clipping for optimizers that unscale gradients by themselves, such as fused AdamW."""

from lightning import Trainer
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer


def clip_unscaled(trainer: Trainer, optimizer: Optimizer, clip_val: int | float | None, algorithm: str | None) -> bool:
    """Clip the gradients of an optimizer that divides them by the loss scale in its own step.

    Lightning refuses that, because such gradients would be clipped before they are divided. Here they are divided
    first, and `GradScaler.step` tells the optimizer not to do so again. An optimizer that finds infinite gradients
    skips its step by itself, so the host waits for nothing. Without a loss scale (bf16-mixed) nothing is divided.

    Args:
        trainer: of the run.
        optimizer: whose gradients are clipped.
        clip_val: the Trainer's `gradient_clip_val`.
        algorithm: the Trainer's `gradient_clip_algorithm`.

    Returns:
        Whether it was such an optimizer; else Lightning can clip.
    """
    plugin = trainer.precision_plugin
    if not clip_val or not isinstance(plugin, MixedPrecision) or not _optimizer_handles_unscaling(optimizer):
        return False
    if plugin.scaler is not None:
        plugin.scaler.unscale_(optimizer)
    # MixedPrecision's own method refuses.
    Precision.clip_gradients(plugin, optimizer, clip_val, GradClipAlgorithmType(algorithm or "norm"))
    return True
