"""Image encoders of the probe: those of timm, and those of checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ..core.fitting import load_fitting
from .settings import ViTSettings

PRETRAINED = "pretrained"
"""Name of timm's own weights."""
_PREFIXES = ("encoder.", "student.image_encoder.")  # in checkpoints of `ImageProbeModule` and of `SHReModule`
_NOT_IN_WEIGHTS = ("heads", "post_norm")  # settings that no shape depends on


def timm_encoder(name: str, image_size: int, pretrained: bool = False) -> Any:
    """Build a vision transformer of timm that outputs its tokens.

    Args:
        name: name of timm's model.
        image_size: image size in pixels.
        pretrained: download timm's weights; positions are resampled for the image size.

    Raises:
        UserError: If there is no such model, or it does not have exactly one token before the patches.
    """
    try:
        encoder = timm.create_model(name, pretrained, num_classes=0, global_pool="", img_size=image_size)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"Expected a vision transformer of timm for images of {image_size} pixels, got {name!r} ({error}): set "
            "model.encoder to one."
        ) from error
    found = getattr(encoder, "num_prefix_tokens", 0)
    if found != 1:
        raise UserError(
            f"Expected an encoder with one token before the patches, the class token, got {name!r} with {found}: set "
            "model.encoder to another vision transformer."
        )
    return encoder


def load_encoder(encoder: nn.Module, source: str, vision: ViTSettings | None = None) -> None:
    """Load an image encoder from a checkpoint.

    Args:
        encoder: encoder to fill.
        source: checkpoint, file or folder, of `SHReModule` or of `ImageProbeModule`.
        vision: settings of the encoder, to compare those that no shape depends on; None for an encoder of timm.

    Raises:
        UserError: If there is no such checkpoint, or it has no such encoder, or one with other settings. Nothing is
            loaded then.
        RuntimeError: If the checkpoint cannot be read.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"Expected a checkpoint in {source!r}, got no file: correct model.weights.")
    content = AtomicCheckpointIO().load_checkpoint(path)
    saved = content.get("hyper_parameters", {}).get("vision", {})
    for name in _NOT_IN_WEIGHTS if vision is not None else ():
        own = getattr(vision, name)
        if saved.get(name, own) != own:
            raise UserError(
                f"Expected an image encoder with {name} {own} in {source!r}, got {saved[name]}: set "
                f"model.vision.{name} to that."
            )
    load_fitting(encoder, _encoder_state(content.get("state_dict", {}), source), f"the image encoder from {source!r}")


def _encoder_state(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return the encoder's part of a state dict, with the encoder's own names."""
    for prefix in _PREFIXES:
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        if own:
            return own
    raise UserError(
        f"Expected a checkpoint of SHReModule or ImageProbeModule in {source!r}, got one without an image encoder: "
        "correct model.weights."
    )
