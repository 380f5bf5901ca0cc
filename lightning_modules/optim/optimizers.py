"""Optimizers with their parameter groups, the memory format of weights and moments, and gradient clipping.

Parameter groups follow timm's rules. A group with weight decay does not set `weight_decay`, so that the optimizer's
value is used; a group without has 0. A group of a lower layer has `lr_scale`, a factor of the learning rate, which
`scale_rates` applies.
"""

from collections.abc import Collection
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ...common.private_api import unscales_gradients

_DECAYS = 1.0  # any number except 0, for which timm would make one group


def adamw(
    groups: list[dict[str, Any]],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
) -> AdamW:
    """Return a fused AdamW whose moments have the memory format of their weights.

    Args:
        groups: parameter groups; `weight_decay` is the default of a group.
        learning_rate: learning rate at its peak.
        weight_decay: weight decay of groups without their own.
        betas: beta1 and beta2.
        eps: epsilon.
    """
    optimizer = AdamW(groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    lay_out_moments(optimizer)
    return optimizer


def sgd(module: nn.Module, learning_rate: float, momentum: float, weight_decay: float) -> SGD:
    """Return SGD on all trainable parameters, with weight decay for vectors too, as in the CRD benchmark."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return SGD(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay, foreach=True)


def weight_decay_groups(module: nn.Module, no_weight_decay: Collection[str] = ()) -> list[dict[str, Any]]:
    """Split trainable parameters into matrices with weight decay, and vectors and named parameters without.

    Args:
        module: module with the parameters.
        no_weight_decay: names of parameters without weight decay.
    """
    groups = param_groups_weight_decay(module, _DECAYS, no_weight_decay_list=no_weight_decay)
    return [_without_decay(group) for group in reversed(groups)]


def layer_decay_groups(
    module: nn.Module, layer_decay: float, no_weight_decay: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Split trainable parameters as `weight_decay_groups` does, and by layer, with lower rates for lower layers.

    Args:
        module: module with a `group_matcher` that assigns parameters to layers, as timm's models have.
        layer_decay: factor of the learning rate from each layer to the layer below.
        no_weight_decay: names of parameters without weight decay.
    """
    groups = param_groups_layer_decay(module, _DECAYS, no_weight_decay, layer_decay=layer_decay)
    return [_without_decay(group) for group in groups]


def scale_rates(optimizer: Optimizer) -> None:
    """Multiply the learning rate of each group by its `lr_scale`, if set."""
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)


def _without_decay(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "weight_decay" or value == 0}


def channels_last(module: nn.Module) -> None:
    """Convert convolution weights to channels-last, which is several times as fast on a CPU.

    Convolutions of three input channels keep their format, and so do the images: torch 2.15 writes out of bounds in the
    backward pass of a 1x1 convolution with stride 2 and three channels in channels-last format (oneDNN), which the stem
    of MCi contains.
    """
    module.to(memory_format=torch.channels_last)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels == 3:
            layer.to(memory_format=torch.contiguous_format)


def lay_out_moments(optimizer: Optimizer) -> None:
    """Convert moments to the memory format of their weights, now and after each load of a state dict.

    A sharded checkpoint holds contiguous moments, and torch 2.15 keeps that format when it loads them. A fused
    optimizer pairs weights and moments by their position in memory, which differs for channels-last weights.
    """
    optimizer.register_load_state_dict_post_hook(_lay_out_moments)
    _lay_out_moments(optimizer)


def _lay_out_moments(optimizer: Optimizer) -> None:
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)


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
    if not clip_val or not isinstance(plugin, MixedPrecision) or not unscales_gradients(optimizer):
        return False
    if plugin.scaler is not None:
        plugin.scaler.unscale_(optimizer)
    # The method of MixedPrecision refuses.
    Precision.clip_gradients(plugin, optimizer, clip_val, GradClipAlgorithmType(algorithm or "norm"))
    return True
