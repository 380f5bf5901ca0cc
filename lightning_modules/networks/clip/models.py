"""MobileCLIP's models by name or shape, built from timm's image towers and open_clip's text tower.

Sizes and normalizations are those of the vendor's and open_clip's configurations. Added here, since neither library has
them: the text tower of S0, the vendor's stem of B, the first generation's S3, S4 and L-14, and a tiny model for tests.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import open_clip
import timm
from open_clip import CustomTextCLIP
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.timm_model import TimmModel
from torch import nn

from ....common.clip_vocabulary import CLIP_VOCABULARY
from ....common.errors import UserError
from ....common.names import did_you_mean
from ....common.preprocessing import Interpolation
from .new_tower import NewTower
from .pair import TowerPair, config_of_image, config_of_pair, config_of_text, fit_projection
from .shapes import Model, ModelShape, OpenClipConfig, resolved
from .text_encoder import CONFIG, tower_of_config
from .text_mixer import add_mixers


def _large(image_tower: str, image_size: int = 256, interpolation: Interpolation = "bilinear") -> ModelShape:
    return ModelShape(
        image_tower,
        image_size,
        embed_dim=768,
        width=768,
        mean=OPENAI_DATASET_MEAN,
        std=OPENAI_DATASET_STD,
        interpolation=interpolation,
    )


_S3, _S4 = _large("fastvit_mci3"), _large("fastvit_mci4")
_L14 = _large("vit_large_patch14_clip_224", 224, "bicubic")
_TIMM_B = ModelShape("vit_base_mci_224", 224, causal=True)

_SMALLEST_TEXT = {"context_length": 2, "vocab_size": 4, "width": 8, "heads": 1, "layers": 1}
"""A text tower of open_clip's in the place of one that is built here."""

PRESETS = {
    "MobileCLIP-S0": ModelShape("fastvit_mci0", layers=4, mixers=True, projection_bias=False),
    "MobileCLIP-S1": ModelShape("fastvit_mci1", projection_bias=False),
    "MobileCLIP-S2": ModelShape("fastvit_mci2", projection_bias=False),
    "MobileCLIP-B": dataclasses.replace(_TIMM_B, vendor_stem=True, projection_bias=False),
    "MobileCLIP-B-timm": _TIMM_B,
    "MobileCLIP-S3": _S3,
    "MobileCLIP-L-14": _L14,
    "MobileCLIP-S4": _S4,
    "MobileCLIP2-S0": ModelShape("fastvit_mci0"),
    "MobileCLIP2-S2": ModelShape("fastvit_mci2"),
    "MobileCLIP2-B": _TIMM_B,
    "MobileCLIP2-S3": _S3,
    "MobileCLIP2-L-14": _L14,
    "MobileCLIP2-S4": _S4,
    "MobileCLIP-tiny": ModelShape(
        "fastvit_mci_tiny", 64, embed_dim=128, width=128, layers=2, mixers=True, projection_bias=False
    ),
}
"""Models by name. B has the stem that the vendor's weights were trained with; `-B-timm` and MobileCLIP2-B timm's."""


def preset_of(model: Model) -> ModelShape | None:
    """Return the shape of a model of `PRESETS`, of a file or of given fields; None for open_clip's and for a pair."""
    shape = resolved(model)
    if isinstance(shape, (OpenClipConfig, TowerPair, NewTower)):
        return None
    return PRESETS.get(shape) if isinstance(shape, str) else shape


def build_model(name: Model, image_size: int | None = None, context_length: int | None = 77) -> CustomTextCLIP:
    """Build a model with random weights, without a download.

    The logarithm of the logit scale has the shape [1], since FSDP2 cannot shard a scalar.

    Args:
        name: one of `PRESETS`, a model of open_clip's, of whose captioners only the towers are built, or fields as in
            `resolved`.
        image_size: side of the images in pixels; None means the model's own.
        context_length: number of tokens in a text; None means the model's own, which is 77 for all of MobileCLIP's.

    Raises:
        UserError: If there is no such model, or the configuration of its text encoder is not found.
    """
    given = resolved(name)
    if isinstance(given, NewTower):
        return _with_new_tower(given, image_size, context_length)
    config = model_config(name, image_size, context_length)
    model = clip_of_config(config, nonscalar_logit_scale=True)
    preset = preset_of(name)
    if preset is not None and preset.image_options:
        model.visual.trunk = _image_tower(preset)
    if preset is not None and preset.mixers:
        add_mixers(model.text)
    if preset is not None and preset.vendor_stem:
        _as_the_vendors(model.visual.trunk)
    if preset is not None and not preset.projection_bias:
        model.visual.trunk.get_classifier().bias.requires_grad_(False).zero_()
    if image_size is not None and isinstance(model.visual, TimmModel):
        model.visual.set_input_size(image_size)  # open_clip builds timm's ViTs in their own size only
    return model


def _with_new_tower(given: NewTower, image_size: int | None, context_length: int | None) -> CustomTextCLIP:
    """Build a trained pair, and put the new tower in the place of the one that it replaces."""
    assert given.of is not None
    kept_size = image_size if given.side == "text" else None
    model = build_model(given.of, kept_size or given.image_size, given.max_tokens)
    width = model_config(given)["embed_dim"]
    tower: Any = build_new_tower(given, width, image_size, context_length)
    if given.side == "image":
        model.visual = tower
        return model
    model.text = tower
    model.context_length = tower.context_length
    model.vocab_size = tower.vocab_size
    return model


def build_new_tower(
    given: NewTower, embed_dim: int, image_size: int | None = None, context_length: int | None = None
) -> nn.Module:
    """Build a new tower alone, with random weights.

    Args:
        given: its description.
        embed_dim: embedding dimension of the pair.
        image_size: side of the images of an image tower in pixels; None means its own.
        context_length: largest number of tokens of a text tower; None means its own.

    Raises:
        UserError: If the configuration of a text encoder is not found, or it has fewer positions.
    """
    if given.text is not None:
        config = config_of_text(given.text) | {"context_length": context_length}
        return tower_of_config(config, embed_dim)
    assert given.image is not None
    config = config_of_image(given.image)
    if image_size is not None:
        config["image_size"] = image_size
    tower: Any = CustomTextCLIP(embed_dim, config, _SMALLEST_TEXT).visual
    fit_projection(tower)
    if image_size is not None:
        tower.set_input_size(image_size)
    return tower


def clip_of_config(config: Mapping[str, Any], **options: Any) -> CustomTextCLIP:
    """Build a pair of towers from open_clip's configuration.

    Args:
        config: as `model_config` returns it.
        **options: other arguments of `CustomTextCLIP`.
    """
    config = {key: value for key, value in config.items() if key != "custom_text"}
    text = config["text_cfg"]
    if CONFIG not in text:
        return CustomTextCLIP(**config, **options)
    # open_clip's own tower of an encoder would read the hub; the smallest of its others stands in its place.
    config["text_cfg"] = _SMALLEST_TEXT
    model = CustomTextCLIP(**config, **options)
    if isinstance(model.visual, TimmModel) and config["vision_cfg"].get("timm_pool") == "":
        fit_projection(model.visual)
    tower = tower_of_config(text, config["embed_dim"])
    model.text = tower
    model.context_length = tower.context_length
    model.vocab_size = tower.vocab_size
    return model


def model_config(name: Model, image_size: int | None = None, context_length: int | None = 77) -> dict[str, Any]:
    """Return the arguments of open_clip's `CustomTextCLIP`: `embed_dim`, `vision_cfg`, `text_cfg` and others.

    Args:
        name: as in `build_model`.
        image_size: as in `build_model`.
        context_length: as in `build_model`.

    Raises:
        UserError: As `build_model` does.
    """
    preset = preset_of(name)
    model = resolved(name)
    if isinstance(model, NewTower):
        assert model.of is not None
        config = model_config(model.of, model.image_size, model.max_tokens)
        if model.image is not None:
            config["vision_cfg"] = config_of_image(model.image)
            context_length = None  # the text tower is the pair's
        if model.text is not None:
            config["text_cfg"] = config_of_text(model.text)
    elif isinstance(model, TowerPair):
        config = config_of_pair(model)
    else:
        config = _open_clips_config(model) if preset is None else _preset_config(preset)
    if image_size is not None:
        config["vision_cfg"]["image_size"] = image_size
    if context_length is not None:
        config["text_cfg"]["context_length"] = context_length
    return config


def has_vendor_stem(model: CustomTextCLIP) -> bool:
    """Return whether the image tower is a ViT with the vendor's stem."""
    embedding: Any = getattr(getattr(model.visual, "trunk", None), "patch_embed", None)
    return hasattr(embedding, "backbone") and _first_convolution(embedding).padding == (1, 1)


def _image_tower(shape: ModelShape) -> nn.Module:
    """Build timm's image tower with the options of a shape, which open_clip cannot pass on."""
    options = {"num_classes": shape.embed_dim, "global_pool": _pool(shape), "drop_path_rate": 0.0}
    try:
        return timm.create_model(shape.image_tower, **(options | (shape.image_options or {})))
    except (TypeError, ValueError, LookupError, AssertionError) as error:
        raise UserError(
            f"Expected image_options of timm's {shape.image_tower}, got {shape.image_options} ({error}): correct them."
        ) from error


def _pool(shape: ModelShape) -> str:
    return "token" if shape.image_tower.startswith("vit") else "avg"


def _preset_config(preset: ModelShape) -> dict[str, Any]:
    vision = {
        "timm_model_name": preset.image_tower,
        "timm_model_pretrained": False,
        "timm_pool": _pool(preset),
        "timm_proj": None,
        "timm_drop": 0.0,
        "timm_drop_path": 0.0,
        "image_size": preset.image_size,
    }
    text = {
        "context_length": 77,
        "vocab_size": CLIP_VOCABULARY,
        "width": preset.width,
        "heads": preset.width // 64,
        "layers": preset.layers,
        "no_causal_mask": not preset.causal,
    }
    return {"embed_dim": preset.embed_dim, "vision_cfg": vision, "text_cfg": text, "custom_text": True}


def _open_clips_config(model: str | ModelShape | OpenClipConfig) -> dict[str, Any]:
    name = str(model)
    if isinstance(model, OpenClipConfig):
        config = copy.deepcopy(model.config)
    elif name not in open_clip.list_models():
        hint = did_you_mean(name, [*PRESETS, *open_clip.list_models()])
        raise UserError(f"Expected one of MobileCLIP's or open_clip's models, got {name!r}: {hint}")
    else:
        config = open_clip.get_model_config(name)
    if config.pop("multimodal_cfg", None) is not None:
        for tower in ("vision_cfg", "text_cfg"):
            config[tower].pop("output_tokens", None)  # what the captioner's decoder reads
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"]["timm_model_pretrained"] = False
    return config | {"custom_text": True}  # one layout for all: the text tower is a submodule


def _as_the_vendors(trunk: Any) -> None:
    """Give timm's ViT the vendor's stem and norms, whose weights have the same shapes."""
    _first_convolution(trunk.patch_embed).padding = (1, 1)
    for module in trunk.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


def _first_convolution(module: nn.Module) -> nn.Conv2d:
    return next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
