"""SHRe's teachers: supervised classifiers, and self-supervised vision transformers of timm (thesis, S-SMKE).

Shapes: B images of S pixels a side, N tokens, width E.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.preprocessing import Normalization
from ..core.fitting import load_fitting
from ..core.frozen import Frozen, reads_weights
from ..core.settings import class_path
from ..networks.classifier_files import load_frozen
from ..networks.classifiers import LibraryClassifier, build_classifier
from ..networks.user_teacher import (
    TeacherImages,
    checked_output,
    network_of_setting,
    record,
    stated_normalization,
    stated_size,
)
from ..networks.vit import read_vision_weights
from .network import timm_transformer
from .settings import TeacherSettings

OPTION = "model.teacher.network"
_SHARED_TABLE = "rel_pos_bias.relative_position_bias_table"
_NOT_IN_TOWER = ("norm.", "fc_norm.", "head", "lm_head", "mask_token", "cls_pt_layers.", "decoder_", "logit_scale")


def load_teacher(frozen: Frozen[Any], settings: TeacherSettings, outputs: int, image_size: int) -> None:
    """Build the teacher and load its weights, unless they are loaded.

    Args:
        frozen: receives the network.
        settings: name and weights, or the network.
        outputs: number of its classes, or its width if its target is an embedding.
        image_size: side of the data's images, in pixels.

    Raises:
        UserError: If the weights are missing or do not fit, or a restored checkpoint was trained with other weights.
    """
    if frozen.loaded:
        return
    if (network := network_of_setting(settings.network, OPTION, outputs)) is not None:
        side = stated_size(network) or image_size
        remedy = "correct the class, set its attribute image_size, or set model.num_classes."
        checked_output(network.eval(), network, torch.zeros(1, 3, side, side), outputs, remedy)
        frozen.network = network
        record(frozen, network, OPTION)
    elif settings.target == "embedding":
        load_class_token(frozen, settings.name, settings.weights, outputs)
    else:
        frozen.network = build_classifier(settings.name, outputs).requires_grad_(False)
        load_frozen(frozen, settings.name, settings.weights, outputs)
    frozen.train()


def teacher_conversion(network: nn.Module, settings: TeacherSettings, data: Any) -> TeacherImages:
    """Return the conversion for a teacher and a datamodule.

    Args:
        network: the teacher's network. A model of timm, or a network of the user's own, names its normalization, and
            its image size where that is fixed.
        settings: normalizations that replace those of network and datamodule.
        data: the run's datamodule, or None. Its property `preprocessing` holds the "mean" and "std" of its images.

    Raises:
        UserError: If the teacher's normalization is known and the data's is not, or if a network of the user's own
            states another one than the settings.
    """
    config: Mapping[str, Any]
    if settings.network is None:
        config = _timm_config(network)
        size = int(config["input_size"][-1]) if config.get("fixed_input_size", False) else None
    else:
        config = stated_normalization(network)._asdict()
        size = stated_size(network)
        _check_stated(network, settings, config)
    mean = settings.mean or config.get("mean")
    std = settings.std or config.get("std")
    if mean is None or std is None:
        return TeacherImages(size, None, None)
    preprocessing = getattr(data, "preprocessing", None) or {}
    data_mean = settings.image_mean or preprocessing.get("mean")
    data_std = settings.image_std or preprocessing.get("std")
    if data_mean is None or data_std is None:
        raise UserError(
            "Expected the normalization of the images, which the teacher needs, got none from "
            f"{'the run, which has no datamodule' if data is None else type(data).__name__}: set "
            "model.teacher.image_mean and model.teacher.image_std."
        )
    return TeacherImages(size, Normalization(tuple(data_mean), tuple(data_std)), Normalization(tuple(mean), tuple(std)))


def _check_stated(network: nn.Module, settings: TeacherSettings, stated: Mapping[str, Any]) -> None:
    for name, numbers in stated.items():
        setting = getattr(settings, name)
        if setting is not None and tuple(setting) != tuple(numbers):
            raise UserError(
                f"Expected no model.teacher.{name}, since {class_path(network)} states {list(numbers)}, got "
                f"{list(setting)}: set model.teacher.mean and model.teacher.std to null, or change the class."
            )


def _timm_config(network: nn.Module) -> Mapping[str, Any]:
    """Return timm's image configuration of a model's weights; empty for other models."""
    if isinstance(network, LibraryClassifier | ClassToken) and type(network.network).__module__.startswith("timm"):
        config: Any = network.network.pretrained_cfg
        return dict(config)
    return {}


class ClassToken(nn.Module):
    """The class token of a vision transformer of timm after its last block, before its last norm.

    Args:
        network: the vision transformer.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        network.norm = nn.Identity()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, S, S] to class tokens [B, E]."""
        tokens: Tensor = self.network.forward_features(image)
        return tokens[:, 0]


def build_class_token(name: str, width: int, tag: str | None = None) -> ClassToken:
    """Build a vision transformer of timm.

    Args:
        name: name of the model, also as "timm/<model>".
        width: width E of its tokens.
        tag: tag of timm's weights to download, such as "dino"; None: random weights.

    Raises:
        UserError: If there is no such model, it does not have exactly one token before the patches, or another width.
    """
    model = name.removeprefix("timm/")
    full_name = model if tag is None else f"{model}.{tag}"
    network = timm_transformer(full_name, "model.teacher.name", pretrained=tag is not None, global_pool="token")
    if network.num_features != width:
        raise UserError(
            f"Expected the teacher's width in model.num_classes, {network.num_features} of {name!r}, got {width}: "
            "correct it."
        )
    return ClassToken(network)


def load_class_token(frozen: Frozen[Any], name: str, source: str | None, width: int) -> None:
    """Build a teacher, load its weights, and record their origin.

    Args:
        frozen: receives the network.
        name: name of timm's model.
        source: a file of its state dict, which may be that of BEiT's pre-training, or a tag of timm's weights.
        width: width E of its tokens.

    Raises:
        UserError: If there is no source, or its tensors are not those of the model.
    """
    if not reads_weights():
        network = build_class_token(name, width)
    elif source is None:
        raise UserError(f"Expected weights of the teacher {name}, got none: set {frozen.argument}.")
    elif "/" not in source and Path(source).suffix == "" and not Path(source).exists():
        network = build_class_token(name, width, source)
    else:
        path = Path(source).expanduser()
        if not path.is_file():
            raise UserError(f"Expected a file with the teacher's weights, got {source!r}: correct {frozen.argument}.")
        network = build_class_token(name, width)
        state = _tower_state(read_vision_weights(str(path)), network.network)
        load_fitting(network.network, state, f"the teacher {name!r} from {source!r}")
    frozen.network = network.requires_grad_(False)
    frozen.record(name, str(source))


def _tower_state(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the embeddings and of the blocks.

    BEiT shares a table of relative positions between its blocks in pre-training; timm's models have one per block.
    """
    names = network.state_dict()
    tower = {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith(_NOT_IN_TOWER) and not name.endswith("relative_position_index")
    }
    if _SHARED_TABLE in tower and _SHARED_TABLE not in names:
        table = tower.pop(_SHARED_TABLE)
        tower |= {
            name: table for name in names if re.fullmatch(r"blocks\.\d+\.attn\.relative_position_bias_table", name)
        }
    return tower
