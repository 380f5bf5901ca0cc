"""A stand-in for a teacher of the user's own, where its code is not needed.

A checkpoint names the class of such a teacher, which runs in training only: everything else works without importing it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class AbsentNetwork(nn.Module):
    """A stand-in for a network that a checkpoint names. Its output is zeros, for a plan of a training.

    Args:
        name: name of the class with its module.
    """

    mean = (0.0, 0.0, 0.0)
    std = (1.0, 1.0, 1.0)
    image_size = 1  # so that a plan counts no images for it

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.width = 1
        self.logit_scale = torch.zeros((), device="cpu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return zeros [B, `width`] for images or token ids of B rows."""
        return torch.zeros(len(inputs), self.width, device=inputs.device)

    encode_image = encode_text = forward


def leave_out_networks(arguments: Any) -> None:
    """Replace each network of the user's own in a module's arguments by the description of an `AbsentNetwork`.

    Args:
        arguments: a module's arguments as plain data or as parsed, which are changed.
    """
    for group in _groups(arguments.get("teacher")):
        network = group.get("network")
        if _has_keys(network) and network.get("class_path") not in (None, _PATH):
            mapping = type(network)
            group["network"] = mapping(class_path=_PATH, init_args=mapping(name=network["class_path"]))


def absent_networks(arguments: Any) -> list[str]:
    """Return the names of the networks that `leave_out_networks` left out of a module's arguments."""
    networks = [group.get("network") for group in _groups(arguments.get("teacher"))]
    return [
        network["init_args"]["name"] for network in networks if _has_keys(network) and network["class_path"] == _PATH
    ]


def _groups(teacher: Any) -> Iterator[Any]:
    """Yield the settings of a teacher, and of the teachers in lists in them."""
    if _has_keys(teacher):
        yield teacher
        values = teacher if isinstance(teacher, Mapping) else vars(teacher)
        for value in list(values.values()):
            yield from filter(_has_keys, value if isinstance(value, list) else [])


def _has_keys(value: Any) -> bool:
    """Return whether a value is a mapping or a namespace of jsonargparse."""
    return hasattr(value, "get") and hasattr(value, "__setitem__")


_PATH = f"{AbsentNetwork.__module__}.{AbsentNetwork.__qualname__}"
