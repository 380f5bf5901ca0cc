"""Vision transformers: initial weights from public models."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import timm
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from ...common.errors import UserError
from ..core.fitting import load_fitting

_DATA2VEC2 = "modality_encoders.IMAGE."
_DATA2VEC2_NAMES = {
    "local_encoder.proj.": "patch_embed.proj.",
    "extra_tokens": "cls_token",
    "fixed_positional_encoder.positions": "pos_embed",
    "context_encoder.norm.": "norm_pre.",
}


def resize_positions(table: Tensor, grid: tuple[int, int], prefix: int = 1) -> Tensor:
    """Resize a ViT's position table [1, p + n, V] to a grid of patches, keeping its first p rows, of the class token.

    Bicubic without antialiasing, as in ALBEF's code; timm's default antialiases and differs by up to 0.3.
    """
    return resample_abs_pos_embed(table, list(grid), num_prefix_tokens=prefix, antialias=False)


def load_vision_weights(encoder: VisionTransformer, source: str, first_blocks: bool = False) -> str:
    """Load a timm model, by name or from a file of its state dict, into an image encoder.

    Args:
        encoder: the ViT to fill.
        source: for example "deit_base_patch16_224.fb_in1k", or a path to a `.pth` or `.safetensors` file, which may be
            Data2Vec 2.0's of fairseq too.
        first_blocks: whether the first blocks of a deeper source are loaded.

    Returns:
        Description of the source, for a log line.

    Raises:
        UserError: If the source is not a ViT of this size; the message lists the keys that do not fit.
    """
    heads = ("head.", "head_dist.", "fc_norm.")  # the encoder has no classifier
    state = {key: value for key, value in read_vision_weights(source).items() if not key.startswith(heads)}
    description = f"image encoder from {source!r}"
    surplus = {key for key in state if _block_of(key) >= len(encoder.blocks)} if first_blocks else set()
    if surplus:
        state = {key: value for key, value in state.items() if key not in surplus}
        description += f", its first {len(encoder.blocks)} blocks"
    grid = encoder.patch_embed.grid_size
    prefix = 0 if encoder.no_embed_class else 1
    table = state.get("pos_embed")
    if table is not None and table.shape[1] != encoder.pos_embed.shape[1]:
        description += f", positions resized from {table.shape[1] - prefix} to {grid[0] * grid[1]} patches"
        state["pos_embed"] = resize_positions(table, grid, prefix)
    load_fitting(encoder, state, f"the image encoder from {source!r}")
    return description


def read_vision_weights(source: str) -> Mapping[str, Tensor]:
    """Return the state dict of a timm model, by name or from a file, or of Data2Vec 2.0's file with timm's names.

    Raises:
        UserError: If a file contains more than tensors.
    """
    if not Path(source).is_file():
        state: Mapping[str, Tensor] = timm.create_model(source, pretrained=True).state_dict()
        return state
    try:
        state = timm.models.load_state_dict(source, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"Expected tensors alone in {source!r}, got objects that could run code when they are loaded: save the "
            "state dict alone, if you trust the file."
        ) from error
    if not any(key.startswith(_DATA2VEC2) for key in state):
        return state
    renamed = {}
    for key, value in state.items():
        if key.startswith("blocks."):
            renamed[key] = value
        for published_name, name in _DATA2VEC2_NAMES.items():
            if key.startswith(_DATA2VEC2 + published_name):
                renamed[key.replace(_DATA2VEC2 + published_name, name)] = value
    return renamed


def _block_of(key: str) -> int:
    match = re.match(r"blocks\.(\d+)\.", key)
    return int(match[1]) if match else -1
