"""WiSE-FT (Wortsman et al., arXiv 2109.01903): weights between those before and after a fine-tuning."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ..core.checkpoints import class_of, saved_settings
from ..networks.clip.lora import LoRASettings, merged_state
from ..networks.clip.pair import RANDOM, TowerPair
from ..networks.clip.shapes import resolved
from ..networks.clip.weights import STUDENT, below


def interpolated(cls: type[Any], content: Mapping[str, Any], source: str, ratio: float) -> dict[str, Any]:
    """Return the checkpoint of a model between the published weights and a training that started with them.

    Of two towers that were not trained together, the networks with trained weights are interpolated; what started with
    random weights, such as the projections, is that of the training.

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
    is_of_class = class_of(saved_settings(content)) == cls.__name__
    trained = _trained_networks(content["hyper_parameters"]) if is_of_class else ()
    if not trained:
        raise UserError(
            f"Expected a training of {cls.__name__} with trained weights to interpolate with, got another in {source}: "
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
    before = start.student.state_dict()
    before |= {name: tensor for name, tensor in after.items() if not name.startswith(trained)}
    state = interpolate(before, after, ratio)
    kept = {
        name: value for name, value in content.items() if name not in ("optimizer_states", "lr_schedulers", "loops")
    }
    return kept | {
        "hyper_parameters": dict(content["hyper_parameters"]) | arguments,
        "state_dict": {STUDENT + name: tensor for name, tensor in state.items()},
        "callbacks": {},
    }


def _trained_networks(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the begins of the names of weights that a training started with, trained."""
    if arguments.get("weights"):
        return ("",)
    pair = resolved(arguments["model"]) if arguments.get("model") is not None else None
    if not isinstance(pair, TowerPair):
        return ()
    networks = {"visual.trunk.": pair.image.weights, "text.transformer.": pair.text.weights}
    return tuple(begin for begin, weights in networks.items() if weights != RANDOM)


def interpolate(before: Mapping[str, Tensor], after: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Return (1 - ratio) before + ratio after of every floating-point tensor, and other tensors of `after`."""
    return {
        name: torch.lerp(before[name].to(tensor), tensor, ratio) if tensor.is_floating_point() else tensor
        for name, tensor in after.items()
    }
