"""MobileCLIP's models by name, built from timm's image towers and open_clip's text tower.

Sizes, normalisations and counts are those of the vendor's configurations and open_clip's; `vlightning` adds what
neither library has: the text tower of S0, the vendor's stem of B, the first generation's S3, S4 and L-14, and a tiny
model for trying things.
"""

import dataclasses
from difflib import get_close_matches
from typing import Any, Literal

import open_clip
from open_clip import CustomTextCLIP
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.timm_model import TimmModel
from torch import nn

from . import tiny  # noqa: F401, timm gets to know its tower
from .text_mixer import add_mixers

Three = tuple[float, float, float]
Interpolation = Literal["bilinear", "bicubic"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """What makes a model.

    Attributes:
        image_tower: timm's name.
        image_size: side of the images, pixels.
        embed_dim: of both towers' features.
        width: of the text tower; a head for each 64.
        layers: of attention in the text tower.
        causal: whether a word sees only those before it.
        mixers: whether the text tower has mixer blocks at both ends (MCt).
        vendor_stem: whether a ViT has the vendor's stem and norms (padding 1, eps 1e-5) instead of timm's (0, 1e-6).
        projection_bias: whether the image projection's bias, which is zero at the start, trains. The vendor's first
            networks have none.
        mean: of the images' channels, on the 0-1 scale.
        std: of the images' channels, on the 0-1 scale.
        interpolation: how images are resized.
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
"""By name. B is the network that the vendor's weights were trained in; `-B-timm` and MobileCLIP2-B are timm's."""


def build_model(name: str, image_size: int | None = None, context_length: int | None = 77) -> CustomTextCLIP:
    """Make a model with random weights; nothing is downloaded.

    The logarithm of the logit scale has the shape [1], since FSDP2 shards nothing without a dimension.

    Args:
        name: one of `PRESETS`, or a model of open_clip's with a text tower of open_clip's.
        image_size: side of the images, pixels; the model's own by default.
        context_length: number of tokens in a text; None for the model's own, which is 77 for all of MobileCLIP's.

    Raises:
        ValueError: if there is no such model, or it cannot be made without a download, or is no pair of towers.
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
        model.visual.set_input_size(image_size)  # open_clip makes timm's ViTs in their own size only
    return model


def model_config(name: str, image_size: int | None = None, context_length: int | None = 77) -> dict[str, Any]:
    """What open_clip makes a model of: `embed_dim`, `vision_cfg`, `text_cfg`, and more for some of its own.

    Args:
        name: as in `build_model`.
        image_size: as in `build_model`.
        context_length: as in `build_model`.

    Raises:
        ValueError: as `build_model` does.
    """
    preset = PRESETS.get(name)
    config = _open_clips_config(name) if preset is None else _preset_config(preset)
    if image_size is not None:
        config["vision_cfg"]["image_size"] = image_size
    if context_length is not None:
        config["text_cfg"]["context_length"] = context_length
    return config


def has_vendor_stem(model: CustomTextCLIP) -> bool:
    """Whether the image tower is a ViT with the vendor's stem."""
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
        known = [*PRESETS, *open_clip.list_models()]
        near = get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"MobileCLIP's are {', '.join(PRESETS)}."
        raise ValueError(f"There is no model {name!r} among MobileCLIP's and open_clip's; {hint}")
    config: dict[str, Any] = open_clip.get_model_config(name)
    if "multimodal_cfg" in config:
        raise ValueError(f"{name} is a captioner, expected a pair of towers: name a model such as ViT-B-16.")
    if "hf_model_name" in config["text_cfg"]:
        raise ValueError(
            f"The text tower of {name} would be downloaded from the Hugging Face hub, expected one that open_clip "
            "makes by itself: name a model such as ViT-B-16."
        )
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"]["timm_model_pretrained"] = False
    return config | {"custom_text": True}  # one layout for all: the text tower is a module of its own


def _as_the_vendors(trunk: Any) -> None:
    """Give timm's ViT the vendor's stem and norms; the weights have the same shapes."""
    _first_convolution(trunk.patch_embed).padding = (1, 1)
    for module in trunk.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


def _first_convolution(module: nn.Module) -> nn.Conv2d:
    return next(part for part in module.modules() if isinstance(part, nn.Conv2d))
