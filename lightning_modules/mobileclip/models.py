"""MobileCLIP's models by name, built from timm's image towers and open_clip's text tower.

Sizes and normalizations are those of the vendor's and open_clip's configurations. Added here, since neither library has
them: the text tower of S0, the vendor's stem of B, the first generation's S3, S4 and L-14, and a tiny model for tests.
"""

import dataclasses
from typing import Any

import open_clip
from open_clip import CustomTextCLIP
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.timm_model import TimmModel
from torch import nn

from ...common.errors import UserError
from ...common.names import did_you_mean
from ..networks.clip_preprocessing import Interpolation, Three
from . import tiny  # noqa: F401, registers its tower with timm
from .text_mixer import add_mixers


@dataclasses.dataclass(frozen=True)
class Preset:
    """Configuration of a model.

    Attributes:
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
    """

    image_tower: str
    image_size: int = 256
    embed_dim: int = 512
    width: int = 512
    layers: int = 12
    causal: bool = False
    mixers: bool = False
    vendor_stem: bool = False
    projection_bias: bool = True
    mean: Three = (0.0, 0.0, 0.0)
    std: Three = (1.0, 1.0, 1.0)
    interpolation: Interpolation = "bilinear"


def _large(image_tower: str, image_size: int = 256, interpolation: Interpolation = "bilinear") -> Preset:
    mean, std = OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    return Preset(image_tower, image_size, 768, 768, mean=mean, std=std, interpolation=interpolation)


_S3, _S4 = _large("fastvit_mci3"), _large("fastvit_mci4")
_L14 = _large("vit_large_patch14_clip_224", 224, "bicubic")
_TIMM_B = Preset("vit_base_mci_224", 224, causal=True)

PRESETS = {
    "MobileCLIP-S0": Preset("fastvit_mci0", layers=4, mixers=True, projection_bias=False),
    "MobileCLIP-S1": Preset("fastvit_mci1", projection_bias=False),
    "MobileCLIP-S2": Preset("fastvit_mci2", projection_bias=False),
    "MobileCLIP-B": dataclasses.replace(_TIMM_B, vendor_stem=True, projection_bias=False),
    "MobileCLIP-B-timm": _TIMM_B,
    "MobileCLIP-S3": _S3,
    "MobileCLIP-L-14": _L14,
    "MobileCLIP-S4": _S4,
    "MobileCLIP2-S0": Preset("fastvit_mci0"),
    "MobileCLIP2-S2": Preset("fastvit_mci2"),
    "MobileCLIP2-B": _TIMM_B,
    "MobileCLIP2-S3": _S3,
    "MobileCLIP2-L-14": _L14,
    "MobileCLIP2-S4": _S4,
    "MobileCLIP-tiny": Preset(
        "fastvit_mci_tiny", 64, embed_dim=128, width=128, layers=2, mixers=True, projection_bias=False
    ),
}
"""Models by name. B has the stem that the vendor's weights were trained with; `-B-timm` and MobileCLIP2-B timm's."""


def build_model(name: str, image_size: int | None = None, context_length: int | None = 77) -> CustomTextCLIP:
    """Build a model with random weights, without a download.

    The logarithm of the logit scale has the shape [1], since FSDP2 cannot shard a scalar.

    Args:
        name: one of `PRESETS`, or a model of open_clip's with a text tower of open_clip's.
        image_size: side of the images in pixels; None means the model's own.
        context_length: number of tokens in a text; None means the model's own, which is 77 for all of MobileCLIP's.

    Raises:
        UserError: if there is no such model, it cannot be built without a download, or is not a pair of towers.
    """
    config = model_config(name, image_size, context_length)
    config.pop("custom_text", None)
    model = CustomTextCLIP(**config, nonscalar_logit_scale=True)
    preset = PRESETS.get(name)
    if preset is not None and preset.mixers:
        add_mixers(model.text)
    if preset is not None and preset.vendor_stem:
        _as_the_vendors(model.visual.trunk)
    if preset is not None and not preset.projection_bias:
        model.visual.trunk.get_classifier().bias.requires_grad_(False).zero_()
    if image_size is not None and isinstance(model.visual, TimmModel):
        model.visual.set_input_size(image_size)  # open_clip builds timm's ViTs in their own size only
    return model


def model_config(name: str, image_size: int | None = None, context_length: int | None = 77) -> dict[str, Any]:
    """Return the arguments of open_clip's `CustomTextCLIP`: `embed_dim`, `vision_cfg`, `text_cfg` and others.

    Args:
        name: as in `build_model`.
        image_size: as in `build_model`.
        context_length: as in `build_model`.

    Raises:
        UserError: as `build_model` does.
    """
    preset = PRESETS.get(name)
    config = _open_clips_config(name) if preset is None else _preset_config(preset)
    if image_size is not None:
        config["vision_cfg"]["image_size"] = image_size
    if context_length is not None:
        config["text_cfg"]["context_length"] = context_length
    return config


def has_vendor_stem(model: CustomTextCLIP) -> bool:
    """Return whether the image tower is a ViT with the vendor's stem."""
    embedding: Any = getattr(getattr(model.visual, "trunk", None), "patch_embed", None)
    return hasattr(embedding, "backbone") and _first_convolution(embedding).padding == (1, 1)


def _preset_config(preset: Preset) -> dict[str, Any]:
    vision = {
        "timm_model_name": preset.image_tower,
        "timm_model_pretrained": False,
        "timm_pool": "token" if preset.image_tower.startswith("vit") else "avg",
        "timm_proj": None,
        "timm_drop": 0.0,
        "timm_drop_path": 0.0,
        "image_size": preset.image_size,
    }
    text = {
        "context_length": 77,
        "vocab_size": 49408,
        "width": preset.width,
        "heads": preset.width // 64,
        "layers": preset.layers,
        "no_causal_mask": not preset.causal,
    }
    return {"embed_dim": preset.embed_dim, "vision_cfg": vision, "text_cfg": text, "custom_text": True}


def _open_clips_config(name: str) -> dict[str, Any]:
    if name not in open_clip.list_models():
        hint = did_you_mean(name, [*PRESETS, *open_clip.list_models()])
        raise UserError(f"Expected one of MobileCLIP's or open_clip's models, got {name!r}: {hint}")
    config: dict[str, Any] = open_clip.get_model_config(name)
    if "multimodal_cfg" in config:
        raise UserError(f"Expected a pair of towers, got the captioner {name}: name a model such as ViT-B-16.")
    if "hf_model_name" in config["text_cfg"]:
        raise UserError(
            f"Expected a text tower of open_clip, got {name}, whose text tower would be downloaded from the Hugging "
            "Face hub: name a model such as ViT-B-16."
        )
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
    return next(part for part in module.modules() if isinstance(part, nn.Conv2d))
