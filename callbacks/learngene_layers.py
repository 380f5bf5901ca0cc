"""Which stored blocks make which layer of a tower: the rules of the multimodal learngene.

Each layer of the trained CLIP, the auxiliary, is a weighted sum of two blocks: one of its tower and one that both
towers share. Two consecutive layers are a pair and have the same sum, and pairs alternate between two groups of blocks.
A descendant of fewer layers has the same pairs, and the last of them once each instead of twice.
"""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

Tower = Literal["vision", "text"]
Components = Literal["both", "unimodal", "multimodal"]

TOWERS: tuple[Tower, ...] = ("vision", "text")
KINDS = (*TOWERS, "multimodal")
"""Whose the blocks are: of one tower, or of both."""
GROUPS = (1, 2)
LINEARS = ("qkv", "proj", "fc1", "fc2")
"""The linear maps of a block; its norms are no part of it."""


def pair_of(layer: int) -> int:
    """The pair that a layer of the auxiliary belongs to, which is the index of its coefficients too; both from 0."""
    return layer // 2


def group_of(pair: int) -> int:
    """The group whose blocks a pair is summed of, 1 or 2."""
    return GROUPS[pair % len(GROUPS)]


def descendant_pairs(depth: int, pairs: int = 6) -> list[int]:
    """The pair that each layer of a descendant starts from.

    Args:
        depth: its number of layers; with twice as many layers as pairs it is the auxiliary.
        pairs: of the auxiliary.

    Returns:
        Numbers of pairs, one a layer: all in order, and the first `depth - pairs` of them twice.

    Raises:
        ValueError: If there is no such descendant.
    """
    if not pairs <= depth <= 2 * pairs:
        raise ValueError(
            f"Found a tower of {depth} layers, expected {pairs} to {2 * pairs}, which the learngene expands to: build "
            "it with such a depth."
        )
    return [pair for pair in range(pairs) for _ in range(2 if pair < depth - pairs else 1)]


def layer_weights(
    tensors: Mapping[str, Tensor], tower: Tower, pair: int, components: Components = "both"
) -> dict[str, Tensor]:
    """The linear maps of a pair's layers: c_uni theta_uni + c_multi theta_multi.

    Args:
        tensors: Blocks and coefficients under the names that they have in a learngene file.
        tower: Whose layers.
        pair: Which of them, from 0.
        components: "unimodal" and "multimodal" take one of the two terms only, for ablations.

    Returns:
        By `qkv.weight`, `qkv.bias`, `proj.weight` and so on: new tensors, through which gradients flow.
    """
    kinds = {"both": (tower, "multimodal"), "unimodal": (tower,), "multimodal": ("multimodal",)}[components]
    weights: dict[str, Tensor] = {}
    for kind in kinds:
        name = tower if kind == tower else f"{tower}_multimodal"
        coefficient = tensors[f"coefficients.{name}"][pair]
        for part in (f"{linear}.{end}" for linear in LINEARS for end in ("weight", "bias")):
            term = coefficient * tensors[f"blocks.{kind}.{group_of(pair)}.{part}"]
            weights[part] = weights[part] + term if part in weights else term
    return weights
