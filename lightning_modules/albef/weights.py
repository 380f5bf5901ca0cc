"""Initial weights of ALBEF's towers from public models: a timm ViT and a BERT (section 3.1 of the paper)."""

from pathlib import Path

import timm
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from transformers import BertForMaskedLM

from ..fitting import load_fitting
from .network import FusionBert


def resize_positions(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize a ViT's position table [1, 1 + n, V] to a grid of patches, keeping the CLS row.

    Plain bicubic without antialiasing, as the authors do it; timm's default antialiases and differs by up to 0.3.
    """
    return resample_abs_pos_embed(table, list(grid), num_prefix_tokens=1, antialias=False)


def load_vision_weights(encoder: VisionTransformer, source: str) -> str:
    """Fill the image encoder from a timm model name, or from a file that such a model's state dict was saved in.

    Args:
        encoder: the ViT to fill.
        source: for example "deit_base_patch16_224.fb_in1k" (the paper's), or a path to a `.pth` or `.safetensors` file.

    Returns:
        What was done, for a log line.

    Raises:
        ValueError: if the source is no ViT of this size; the sentence lists the keys that do not fit.
    """
    if Path(source).is_file():
        state = timm.models.load_state_dict(source, weights_only=True)
    else:
        state = timm.create_model(source, pretrained=True).state_dict()
    # The classifier is no part of an encoder.
    state = {key: value for key, value in state.items() if not key.startswith(("head.", "head_dist.", "fc_norm."))}
    resized = ""
    grid = encoder.patch_embed.grid_size
    table = state.get("pos_embed")
    if table is not None and table.shape[1] != encoder.pos_embed.shape[1]:
        resized = f", positions resized from {table.shape[1] - 1} to {grid[0] * grid[1]} patches"
        state["pos_embed"] = resize_positions(table, grid)
    load_fitting(encoder, state, f"the image encoder from {source!r}")
    return f"image encoder from {source!r}{resized}"


def load_text_weights(encoder: FusionBert, source: str) -> str:
    """Fill text layers, fusion layers and language-model head from a BERT; cross-attention stays random.

    Args:
        encoder: the BERT to fill.
        source: hub name or folder of a BERT with a masked-language-model head, for example "bert-base-uncased".

    Returns:
        What was done, for a log line.

    Raises:
        ValueError: if the source is no BERT of this size; the sentence lists the keys that do not fit.
    """
    state = BertForMaskedLM.from_pretrained(source).state_dict()
    own = encoder.state_dict()
    kept = {key: value for key, value in own.items() if ".crossattention." in key}
    # A BERT deeper than ours gives its lower layers to the text encoder and its next ones to fusion.
    surplus = [key for key in state if _layer_of(key) >= len(encoder.layers)]
    state = {key: value for key, value in state.items() if key not in surplus}
    load_fitting(encoder, state | kept, f"the text encoder from {source!r}")
    return f"text and fusion encoder from {source!r}, cross-attention random"


def _layer_of(key: str) -> int:
    parts = key.split(".")
    return int(parts[parts.index("layer") + 1]) if "layer" in parts else -1
