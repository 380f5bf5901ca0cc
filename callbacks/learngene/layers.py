"""What makes which layer of a tower: the rules of the multimodal learngene, and of two that it is compared with.

MM-LG: each layer of the trained CLIP, the auxiliary, is a weighted sum of two blocks, one of its tower and one that
both towers share. Two consecutive layers are a pair and have the same sum, and pairs alternate between two groups of
blocks. A descendant of fewer layers has the same pairs, and the last of them once each instead of twice.

TLEG (Xia et al., "Transformer as Linear Expansion of Learngene"): layer i of n is base + i/n * slope, each tower with
two blocks of its own, norms included, whatever n is.

He-LG (Wang et al., "Learngene: From Open-World to Your Learning Task"): the last three layers of an ordinary CLIP are
the last ones of the descendant; the rest of it stays as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

Tower = Literal["vision", "text"]
Components = Literal["both", "unimodal", "multimodal"]
Method = Literal["MM-LG", "TLEG", "He-LG"]
Layer = dict[str, Tensor]
"""A layer's tensors, by `qkv.weight`, `qkv.bias`, `proj.weight` and so on, and `norm1.weight` to `norm2.bias`."""

TOWERS: tuple[Tower, ...] = ("vision", "text")
KINDS = (*TOWERS, "multimodal")
"""Whose the blocks are: of one tower, or of both."""
GROUPS = (1, 2)
LINEARS = ("qkv", "proj", "fc1", "fc2")
"""The linear maps of a block; the norms of MM-LG are no part of it."""
NORMS = ("norm1", "norm2")
TERMS = ("base", "slope")
"""The blocks of a tower in TLEG."""
LAST = 3
"""Layers of a tower in He-LG."""


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


def descendant_layers(
    method: Method,
    tensors: Mapping[str, Tensor],
    tower: Tower,
    depth: int,
    pairs: int = 6,
    components: Components = "both",
) -> Sequence[Layer]:
    """What the layers of a descendant's tower start from, first to last.

    Args:
        method: Whose rule.
        tensors: Under the names that they have in a learngene file.
        tower: Which.
        depth: Its number of layers.
        pairs: Half the auxiliary's number of layers.
        components: As in `layer_weights`.

    Returns:
        Each layer's tensors; none for one that stays as it is.

    Raises:
        ValueError: If there is no such descendant, or the method has no such components.
    """
    if method != "MM-LG" and components != "both":
        raise ValueError(
            f"Found components {components!r}, but the layers of {method} are no sums of two kinds: leave it out."
        )
    if method == "TLEG":
        if depth < 1:
            raise ValueError(f"Found a tower of {depth} layers, expected at least 1: build it with some.")
        return [linear_layer(tensors, tower, layer, depth) for layer in range(depth)]
    if method == "He-LG":
        if depth < LAST:
            raise ValueError(f"Found a tower of {depth} layers, expected at least the {LAST} of He-LG: build it so.")
        last = [_below(tensors, f"layers.{tower}.{layer}.") for layer in range(LAST)]
        return [{} for _ in range(depth - LAST)] + last
    norms = _below(tensors, f"norms.{tower}.")
    return [norms | layer_weights(tensors, tower, pair, components) for pair in descendant_pairs(depth, pairs)]


def linear_layer(tensors: Mapping[str, Tensor], tower: Tower, layer: int, depth: int) -> Layer:
    """A layer of TLEG: base + layer / depth * slope, layers counted from 0.

    Args:
        tensors: Blocks under the names that they have in a learngene file.
        tower: Whose.
        layer: From 0.
        depth: Of the tower.

    Returns:
        New tensors, through which gradients flow.
    """
    base, slope = (_below(tensors, f"blocks.{tower}.{term}.") for term in TERMS)
    return {name: tensor + layer / depth * slope[name] for name, tensor in base.items()}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> Layer:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def layer_weights(tensors: Mapping[str, Tensor], tower: Tower, pair: int, components: Components = "both") -> Layer:
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
    weights: Layer = {}
    for kind in kinds:
        name = tower if kind == tower else f"{tower}_multimodal"
        coefficient = tensors[f"coefficients.{name}"][pair]
        for part in (f"{linear}.{end}" for linear in LINEARS for end in ("weight", "bias")):
            term = coefficient * tensors[f"blocks.{kind}.{group_of(pair)}.{part}"]
            weights[part] = weights[part] + term if part in weights else term
    return weights
