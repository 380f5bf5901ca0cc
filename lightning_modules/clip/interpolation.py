"""WiSE-FT (Wortsman et al., arXiv 2109.01903): weights between those before and after a fine-tuning."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ..core.checkpoints import class_of, saved_settings
from ..networks.clip.lora import LoRASettings, merged_state
from ..networks.clip.weights import STUDENT, below


def interpolated(cls: type[Any], content: Mapping[str, Any], source: str, ratio: float) -> dict[str, Any]:
    """Return the checkpoint of a model between the published weights and a training that started with them.

    Args:
        cls: class of the method, with a network `student`.
        content: the checkpoint of the training.
        source: where the checkpoint is from, for messages.
        ratio: share of the training's weights: 0 is the published model, 1 the fine-tuned one with merged adapters.

    Returns:
        The checkpoint, without the state of optimizer, loops and callbacks.

    Raises:
        UserError: If the checkpoint is of another class, has no `weights` that it started with, or they cannot be read.
    """
    if class_of(saved_settings(content)) != cls.__name__ or not content["hyper_parameters"].get("weights"):
        raise UserError(
            f"Expected a training of {cls.__name__} with model.weights to interpolate with, got another in {source}: "
            "give the checkpoint of a fine-tuning."
        )
    # The command line adds the name of the class.
    arguments = {name: value for name, value in content["hyper_parameters"].items() if not name.startswith("_")}
    lora = arguments["tuning"].get("lora")
    arguments["tuning"] = dict(arguments["tuning"]) | {"lora": None}
    start = cls(**arguments)
    start.load_initial_weights()
    after = below(STUDENT, content["state_dict"])
    if lora:
        after = merged_state(after, LoRASettings(**lora))
    state = interpolate(start.student.state_dict(), after, ratio)
    kept = {
        name: value for name, value in content.items() if name not in ("optimizer_states", "lr_schedulers", "loops")
    }
    return kept | {
        "hyper_parameters": dict(content["hyper_parameters"]) | arguments,
        "state_dict": {STUDENT + name: tensor for name, tensor in state.items()},
        "callbacks": {},
    }


def interpolate(before: Mapping[str, Tensor], after: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Return (1 - ratio) before + ratio after of every floating-point tensor, and other tensors of `after`."""
    return {
        name: torch.lerp(before[name].to(tensor), tensor, ratio) if tensor.is_floating_point() else tensor
        for name, tensor in after.items()
    }
