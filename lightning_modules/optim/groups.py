"""Parameter groups for optimizers with weight decay."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


def weight_decay_groups(
    module: nn.Module, weight_decay: float, decay: tuple[str, ...] = (), spare: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Split the trainable parameters into one group with weight decay and one without.

    Vectors and scalars (norms, biases, temperatures) are not decayed; matrices and everything of more dimensions are.

    Args:
        module: its parameters with `requires_grad` are taken, tied ones once.
        weight_decay: of the first group.
        decay: names of parameters that decay whatever their shape.
        spare: names of parameters that do not.

    Raises:
        ValueError: if a name in `decay` or `spare` is no trainable parameter of `module`.
    """
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    unknown = {*decay, *spare} - named.keys()
    if unknown:
        raise ValueError(f"No trainable parameter is named {sorted(unknown)}, so its weight decay cannot be set.")
    decays = {name for name, p in named.items() if (p.ndim >= 2 and name not in spare) or name in decay}
    decayed = [p for name, p in named.items() if name in decays]
    spared = [p for name, p in named.items() if name not in decays]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]


def layer_decay_groups(
    groups: Iterable[dict[str, Any]], layers: Mapping[nn.Parameter, int], learning_rate: float, decay: float
) -> list[dict[str, Any]]:
    """Divide parameter groups by layer, with a learning rate that falls from the last layer to the first.

    Args:
        groups: such as those of `weight_decay_groups`; what they say beside the parameters holds for their parts.
        layers: number of the layer of each parameter, from 0.
        learning_rate: of the last layer.
        decay: factor from each layer to the one below it.
    """
    last = max(layers.values())
    return [
        {
            **group,
            "params": [parameter for parameter in group["params"] if layers[parameter] == layer],
            "lr": learning_rate * decay ** (last - layer),
        }
        for group in groups
        for layer in sorted({layers[parameter] for parameter in group["params"]})
    ]
