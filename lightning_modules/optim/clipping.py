"""Gradient clipping for optimizers that unscale gradients by themselves, such as fused AdamW."""

from lightning import LightningModule, Trainer
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer


class ClippedFusedGradients(LightningModule):
    """A LightningModule whose gradients can be clipped under mixed precision although its optimizer is fused.

    Lightning refuses that, because such an optimizer divides gradients by the loss scale in its own step, after they
    would have been clipped. Here they are divided before they are clipped, and `GradScaler.step` then tells the
    optimizer not to do so again. An optimizer that finds infinite gradients skips its step by itself, so the host waits
    for nothing. Without a loss scale (bf16-mixed) there is nothing to divide.
    """

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients, after they were divided by the loss scale, where there is one."""
        if not clip_unscaled(self.trainer, optimizer, gradient_clip_val, gradient_clip_algorithm):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)


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
