"""MobileCLIP's models by name, built from timm's image towers and open_clip's text tower.

Sizes, normalisations and counts are those of the vendor's configurations and open_clip's; `vlightning` adds what
neither library has: the text tower of S0, the vendor's stem of B, and the first generation's S3, S4 and L-14.
"""

import dataclasses
from difflib import get_close_matches
from typing import Any

import open_clip
from open_clip import CustomTextCLIP
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import nn

from .text_mixer import add_mixers

Three = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Preset:
    """What makes a model.

    Attributes:
        image_tower: timm's name.
        image_size: side of the pictures, pixels.
        embed_dim: of both towers' features.
        width: of the text tower; a head for each 64.
        layers: of attention in the text tower.
        causal: whether a word sees only those before it.
        mixers: whether the text tower has mixer blocks at both ends (MCt).
        vendor_stem: whether a ViT has the vendor's stem and norms (padding 1, eps 1e-5) instead of timm's (0, 1e-6).
        mean: of the pictures' channels, on the 0-1 scale.
        std: of the pictures' channels, on the 0-1 scale.
        interpolation: how pictures are resized.
    """

    image_tower: str
    image_size: int = 256
    embed_dim: int = 512
    width: int = 512
    layers: int = 12
    causal: bool = False
    mixers: bool = False
    vendor_stem: bool = False
    mean: Three = (0.0, 0.0, 0.0)
    std: Three = (1.0, 1.0, 1.0)
    interpolation: str = "bilinear"


def _large(image_tower: str, image_size: int = 256, interpolation: str = "bilinear") -> Preset:
    mean, std = OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    return Preset(image_tower, image_size, 768, 768, mean=mean, std=std, interpolation=interpolation)


_S3, _S4 = _large("fastvit_mci3"), _large("fastvit_mci4")
_L14 = _large("vit_large_patch14_clip_224", 224, "bicubic")
_TIMM_B = Preset("vit_base_mci_224", 224, causal=True)

PRESETS = {
    "MobileCLIP-S0": Preset("fastvit_mci0", layers=4, mixers=True),
    "MobileCLIP-S1": Preset("fastvit_mci1"),
    "MobileCLIP-S2": Preset("fastvit_mci2"),
    "MobileCLIP-B": dataclasses.replace(_TIMM_B, vendor_stem=True),
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
}
"""By name. B is the network that the vendor's weights were trained in; `-B-timm` and MobileCLIP2-B are timm's."""


def build_model(name: str, image_size: int | None = None) -> CustomTextCLIP:
    """Make a model with random weights.

    Args:
        name: one of `PRESETS`, or any model of open_clip with towers of its own.
        image_size: side of the pictures, pixels; the model's own by default.

    Raises:
        ValueError: if there is no such model.
    """
    preset = PRESETS.get(name)
    if preset is None:
        return _from_open_clip(name, image_size)
    vision: dict[str, Any] = {
        "timm_model_name": preset.image_tower,
        "timm_model_pretrained": False,
        "timm_pool": "token" if preset.image_tower.startswith("vit") else "avg",
        "timm_proj": None,
        "timm_drop": 0.0,
        "timm_drop_path": 0.0,
        "image_size": image_size or preset.image_size,
    }
    text = {
        "context_length": 77,
        "vocab_size": 49408,
        "width": preset.width,
        "heads": preset.width // 64,
        "layers": preset.layers,
        "no_causal_mask": not preset.causal,
    }
    model = CustomTextCLIP(preset.embed_dim, vision, text)
    if preset.mixers:
        add_mixers(model.text)
    if preset.vendor_stem:
        _as_the_vendors(model.visual.trunk)
    return model


def _as_the_vendors(trunk: Any) -> None:
    """Give timm's ViT the vendor's stem and norms; the weights have the same shapes."""
    first = next(module for module in trunk.patch_embed.modules() if isinstance(module, nn.Conv2d))
    first.padding = (1, 1)
    for module in trunk.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


def _from_open_clip(name: str, image_size: int | None) -> Any:
    if name not in open_clip.list_models():
        known = [*PRESETS, *open_clip.list_models()]
        near = get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"MobileCLIP's are {', '.join(PRESETS)}."
        raise ValueError(f"There is no model {name!r} among MobileCLIP's and open_clip's; {hint}")
    return open_clip.create_model(name, force_image_size=image_size)
