"""Parameter groups by timm's rules.

A group with weight decay does not set `weight_decay`, so that the optimizer's value is used; a group without has 0. A
group of a lower layer has `lr_scale`, a factor of the learning rate, which `scale_rates` applies.
"""

from collections.abc import Collection
from typing import Any

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.optim import Optimizer

_DECAYS = 1.0  # any number except 0, for which timm would make one group


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
