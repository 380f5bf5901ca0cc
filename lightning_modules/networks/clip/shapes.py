"""The shape of a model's towers: of a preset, of a YAML or JSON file, or of the settings in a checkpoint.

For tests and quickstarts timm gets a tiny image tower here, `fastvit_mci_tiny`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import open_clip
import timm
from timm.models import FastVit, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.fastvit import RepConditionalPosEnc

from ....common.errors import UserError
from ....common.files import read_yaml
from ....common.names import did_you_mean
from ....common.preprocessing import Interpolation, Three
from ....common.ranges import COUNT, FINITE, POSITIVE, Range, SettingsGroup
from ...core.settings import settings
from .new_tower import NewTower
from .pair import TextTower, TowerPair, completed
from .text_encoder import with_config

_ENDINGS = (".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True)
class ModelShape(SettingsGroup, option="model"):
    """Sizes and kinds of both towers.

    Args:
        image_tower: timm's name.
        image_size: side of the images in pixels.
        embed_dim: embedding dimension of both towers.
        width: width of the text tower, with one head for each 64.
        layers: layers of attention in the text tower.
        causal: whether a token attends only to those before it.
        mixers: whether the text tower has mixer blocks at both ends (MCt).
        vendor_stem: whether a ViT has the vendor's stem and norms (padding 1, eps 1e-5) instead of timm's (0, 1e-6).
        projection_bias: whether the image projection's bias, initially zero, trains. The vendor's first networks have
            none.
        mean: mean of the images' channels on the 0-1 scale.
        std: standard deviation of the images' channels on the 0-1 scale.
        interpolation: interpolation of the images' resize.
        image_options: arguments of timm's image tower in place of those that its name implies, such as `layers` and
            `embed_dims` of each stage of a `fastvit_mci0`.

    Raises:
        UserError: If timm has no such tower, or the width is not a multiple of 64.
    """

    image_tower: str
    image_size: Annotated[int, COUNT] = 256
    embed_dim: Annotated[int, COUNT] = 512
    width: Annotated[int, Range(least=64)] = 512
    layers: Annotated[int, COUNT] = 12
    causal: bool = False
    mixers: bool = False
    vendor_stem: bool = False
    projection_bias: bool = True
    mean: Annotated[Three, FINITE] = (0.0, 0.0, 0.0)
    std: Annotated[Three, POSITIVE] = (1.0, 1.0, 1.0)
    interpolation: Interpolation = "bilinear"
    image_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not timm.is_model(self.image_tower):
            hint = did_you_mean(self.image_tower, timm.list_models())
            raise UserError(f"Expected an image_tower of timm, got {self.image_tower!r}: {hint}")
        if self.width % 64:
            raise UserError(f"Expected a width of a multiple of 64, that of a head, got {self.width}: correct it.")

    def __str__(self) -> str:
        return f"{self.image_tower} of its own shape"


@dataclasses.dataclass(frozen=True)
class OpenClipConfig(SettingsGroup, option="model"):
    """A model by open_clip's configuration, for one whose name open_clip does not know.

    Args:
        name: name for messages.
        config: the `model_cfg` of its `open_clip_config.json`.
    """

    name: str
    config: dict[str, Any]

    def __str__(self) -> str:
        return self.name


Model = str | ModelShape | OpenClipConfig | TowerPair | NewTower | Mapping[str, Any]
"""A name, the path of a YAML or JSON file with the fields of one of the four classes, or these fields."""


def resolved(model: Model) -> str | ModelShape | OpenClipConfig | TowerPair | NewTower:
    """Return a name unchanged, and a path or fields as what they describe.

    A model with a text encoder of transformers has the encoder's configuration, and so depends on no file.

    Raises:
        UserError: If the file cannot be read, describes no model, or the encoder's configuration is not found.
    """
    if isinstance(model, TowerPair):
        return completed(model)
    if isinstance(model, NewTower):
        return model.completed()
    if isinstance(model, str) and not model.endswith(_ENDINGS):
        return _with_encoder(model)
    if not isinstance(model, (str, Mapping)):
        return model
    fields = _read(model) if isinstance(model, str) else model
    source = repr(model) if isinstance(model, str) else "the model's shape"
    if "config" in fields:
        return settings(OpenClipConfig, fields)
    if "of" in fields:
        return settings(NewTower, fields).completed()
    if {"image", "text"} & fields.keys():
        return completed(settings(TowerPair, fields))
    if "image_tower" not in fields:
        raise UserError(f"Expected an image_tower in {source}, got none: name one of timm's, such as fastvit_mci0.")
    return settings(ModelShape, fields)


def text_tower_of(model: Model) -> TextTower | None:
    """Return the description of a text tower of one's own, with its prefix; None for other models."""
    given = resolved(model)
    if isinstance(given, NewTower) and given.text is None:
        return None if given.of is None else text_tower_of(given.of)
    return given.text if isinstance(given, (TowerPair, NewTower)) else None


def text_prefix_of(model: Model) -> str:
    """Return the text that a model expects before each text; mostly empty."""
    text = text_tower_of(model)
    return "" if text is None else text.prefix


def _with_encoder(name: str) -> str | OpenClipConfig:
    """Return the configuration of a model of open_clip's with a text encoder of transformers, else the name."""
    config = open_clip.get_model_config(name) if name in open_clip.list_models() else None
    if config is None or "hf_model_name" not in config["text_cfg"]:
        return name
    return OpenClipConfig(name, with_config(config))


def _read(file: str) -> Mapping[str, Any]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"Expected a file with a model's shape, found none at {file!r}: correct the path.")
    return read_yaml(path)


# timm looks for this name when it registers the model, and warns without it.
default_cfgs = generate_default_cfgs({"fastvit_mci_tiny.untrained": {"input_size": (3, 64, 64), "num_classes": 128}})


@register_model
def fastvit_mci_tiny(pretrained: bool = False, **kwargs: Any) -> FastVit:
    """Build a tower with every kind of layer that MobileCLIP-S0 has: 0.7 M parameters, stride 32, images of any size.

    Args:
        pretrained: must be False, there are no trained weights.
        **kwargs: arguments of timm's FastVit.
    """
    defaults = {
        "layers": (1, 1, 2, 1),
        "embed_dims": (24, 48, 96, 192),
        "mlp_ratios": (3, 3, 3, 3),
        "se_downsamples": (False, False, True, True),
        "pos_embs": (None, None, None, partial(RepConditionalPosEnc, spatial_shape=(7, 7))),
        "token_mixers": ("repmixer", "repmixer", "repmixer", "attention"),
        "lkc_use_act": True,
    }
    return build_model_with_cfg(FastVit, "fastvit_mci_tiny", pretrained, **(defaults | kwargs))
