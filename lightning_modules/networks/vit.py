"""Vision transformers: those of timm by name, and initial weights from public models and from this package."""

import functools
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import Mlp, resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ...common.errors import UserError
from ..core.checkpoints import is_checkpoint, is_folder, tower_in
from ..core.fitting import load_fitting
from ..core.memory import LeanMlp
from .clip.pair import check_image_network
from .initial import init_linear

_ENCODERS = ("visual.trunk.", "image_encoder.trunk.", "image_encoder.", "visual_encoder.")
"""Names of a network of timm in the students of this package."""
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


def named_vit(name: str, image_size: int | None, option: str) -> VisionTransformer:
    """Build a vision transformer of timm whose output is all of its tokens, the class token first.

    Args:
        name: timm's name.
        image_size: side of the images in pixels; None means the network's own.
        option: option that names it, for messages.

    Raises:
        UserError: If timm has no such network, or it is not a `VisionTransformer` with exactly one token before the
            patches and a norm behind the last block.
    """
    check_image_network(name, option)
    network: Any = timm.create_model(name, **({} if image_size is None else {"img_size": image_size}))
    is_vit = isinstance(network, VisionTransformer) and all(isinstance(block, Block) for block in network.blocks)
    if not is_vit or network.num_prefix_tokens != 1 or not isinstance(network.fc_norm, nn.Identity):
        raise UserError(
            f"Expected a vision transformer of timm with one class token, and a norm behind its blocks, as {option}, "
            f"got {name!r}, a {type(network).__name__}: name another, such as vit_small_patch16_224."
        )
    network.reset_classifier(0, "")
    network.blocks.apply(init_linear)
    for block in network.blocks:
        if type(block.mlp) is Mlp:
            block.mlp.__class__ = LeanMlp  # the same function
    return network


@functools.cache
def sizes_of_vit(name: str, option: str) -> dict[str, Any]:
    """Return `patch_size`, `width`, `depth`, `heads` and `mlp_ratio` of a vision transformer of timm.

    Args:
        name: timm's name.
        option: option that names it, for messages.

    Raises:
        UserError: As `named_vit` does.
    """
    with torch.device("meta"):
        network: Any = named_vit(name, None, option)
    block = network.blocks[0]
    return {
        "patch_size": network.patch_embed.patch_size[0],
        "width": network.embed_dim,
        "depth": len(network.blocks),
        "heads": block.attn.num_heads,
        "mlp_ratio": block.mlp.fc1.out_features / network.embed_dim,
    }


def load_vision_weights(encoder: VisionTransformer, source: str, first_blocks: bool = False) -> str:
    """Load a timm model, by name or from a file of its state dict, into an image encoder.

    Args:
        encoder: the ViT to fill.
        source: for example "deit_base_patch16_224.fb_in1k"; a path to a `.pth` or `.safetensors` file, which may be
            Data2Vec 2.0's of fairseq too; or a checkpoint or an export of this package with such an encoder.
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
    """Return the state dict of a timm model, by name or from a file, with timm's names.

    A file may be Data2Vec 2.0's, a checkpoint of this package, and a folder an export of it.

    Raises:
        UserError: If a file contains more than tensors, or a training here has no image encoder.
    """
    path = Path(source).expanduser()
    if is_checkpoint(path) or is_folder(path):
        if encoder := tower_in(path, _ENCODERS):
            return encoder
        raise UserError(f"Expected a training with an image encoder, got none in {source!r}: give another.")
    if not path.is_file():
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
