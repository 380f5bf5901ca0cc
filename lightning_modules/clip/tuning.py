"""Which weights of a pair of towers train, and with which learning rates."""

from collections import defaultdict
from typing import Any, Literal

from open_clip import CustomTextCLIP
from torch import nn

from ...common.errors import UserError
from ..core.memory import BatchNorm
from ..networks.clip.lora import add_adapters
from ..networks.clip.pair import IMAGE_PROJECTION
from ..networks.clip.text_encoder import PROJECTION
from ..networks.clip.towers import layers_of
from ..optim.optimizers import weight_decay_groups
from .settings import TuningSettings

TOWERS = {"visual": "lock_image", "text": "lock_text"}
"""Attribute of each tower, and the setting that locks it."""


PROJECTIONS = {"visual": IMAGE_PROJECTION, "text": PROJECTION}
"""Attribute of each tower, and the begin of the names of its projection's weights in a pair of one's own."""


def prepare(network: CustomTextCLIP, tuning: TuningSettings, is_pair: bool = False) -> None:
    """Add adapters and lock layers, in place.

    Args:
        network: both towers.
        tuning: which weights train.
        is_pair: whether the towers were not trained together: their projections then always train.

    Raises:
        UserError: If a tower has fewer blocks than are locked, or nothing is left to train.
    """
    if tuning.lora is not None:
        add_adapters(network, tuning.lora)
        network.logit_scale.requires_grad_(True)
        if network.logit_bias is not None:
            network.logit_bias.requires_grad_(True)
    for tower, setting in TOWERS.items():
        _lock(getattr(network, tower), getattr(tuning, setting), f"tuning.{setting}")
        if is_pair:
            projection = PROJECTIONS[tower]
            for name, parameter in getattr(network, tower).named_parameters():
                if name.startswith(projection):
                    parameter.requires_grad_(True)
    if not any(parameter.requires_grad for tower in TOWERS for parameter in getattr(network, tower).parameters()):
        raise UserError(
            f"Expected weights to train beside the logit scale, got tuning.lock_image={tuning.lock_image!r} and "
            f"tuning.lock_text={tuning.lock_text!r}, which lock all: lock fewer blocks."
        )


def _lock(tower: nn.Module, lock: int | Literal["all"], name: str) -> None:
    layers = layers_of(tower)
    if lock != "all" and lock > layers.blocks:
        raise UserError(
            f"Expected at most {layers.blocks} as {name}, the number of the tower's blocks, got {lock}: lower it, or "
            "give all."
        )
    for weight, parameter in tower.named_parameters():
        if lock == "all" or (lock and layers.of[weight] <= lock):
            parameter.requires_grad_(False)


def fix_batch_norm(network: nn.Module, tuning: TuningSettings) -> None:
    """Put layers of BatchNorm whose statistics must not change into eval mode: all, or those of locked layers."""
    for module in network.modules():
        if isinstance(module, BatchNorm):
            trains = module.weight is not None and module.weight.requires_grad
            if tuning.batch_norm == "fixed" or not trains:
                module.eval()


def fix_locked_encoders(network: CustomTextCLIP) -> None:
    """Put encoders without a weight that trains into eval mode: dropout would change a locked tower's features."""
    for encoder in (network.visual.trunk, network.text.transformer):
        if not any(parameter.requires_grad for parameter in encoder.parameters()):
            encoder.eval()


def parameter_groups(module: nn.Module, network: CustomTextCLIP, layer_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay, of each layer of each tower if the rates differ.

    A group of layer l of a tower with n blocks has `lr_scale` = layer_decay^(n + 1 - l).

    Args:
        module: what trains.
        network: both towers, a part of `module`.
        layer_decay: factor of the learning rate from each layer to the layer below.
    """
    adapters = [name for name, _ in module.named_parameters() if ".lora_" in name]
    groups = weight_decay_groups(module, adapters)
    if layer_decay == 1:
        return groups
    scales = {}
    for tower in (network.visual, network.text):
        layers = layers_of(tower)
        for name, parameter in tower.named_parameters():
            scales[parameter] = layer_decay ** (layers.blocks + 1 - layers.of[name])
    split = []
    for group in groups:
        by_scale = defaultdict(list)
        for parameter in group["params"]:
            by_scale[scales.get(parameter, 1.0)].append(parameter)
        split += [group | {"params": parameters, "lr_scale": scale} for scale, parameters in by_scale.items()]
    return split
