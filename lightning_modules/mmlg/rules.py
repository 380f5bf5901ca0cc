"""The layers of a tower as sums of stored blocks: the rule of MM-LG, and those of the two methods it is compared with.

MM-LG (section 3.1): layer i of a tower is a sum of a block theta of that tower and a block that both towers share,
each times a scalar c:

    P_i = c_k theta_j + c_k^m theta_j^m  (eqs. 1, 2)    with pair k = i // 2, group j = k mod 2

so that two consecutive layers, a pair, are equal, and pairs alternate between two groups of blocks. A descendant of
fewer layers (section 3.3) has the same pairs, and the last ones once instead of twice.

TLEG (Xia et al., "Transformer as Linear Expansion of Learngene"): layer i of n is base + i / n * slope, with two blocks
for each tower, norms included, for any n.

He-LG (Wang et al., "Learngene: From Open-World to Your Learning Task"): the last three layers of an ordinary CLIP are
the last three of the descendant; its other layers keep their own initial values.

Tensors of a learngene, beside those of the towers' ends:

    MM-LG    blocks.{vision, text, multimodal}.{1, 2}.{qkv, proj, fc1, fc2}.{weight, bias}
             coefficients.{vision, vision_multimodal, text, text_multimodal}    [pairs] each
             norms.{vision, text}.{norm1, norm2}.{weight, bias}                 shared by the layers of a tower
    TLEG     blocks.{vision, text}.{base, slope}.{qkv, ..., norm2}.{weight, bias}
    He-LG    layers.{vision, text}.{0, 1, 2}.{qkv, ..., norm2}.{weight, bias}   and no ends
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from ...callbacks.learngene.layers import TOWERS, Components, Layer, Rule, Tower, register_rule, tensors_below
from ...callbacks.learngene.sizes import LINEARS, LearngeneSizes, Shapes, with_prefixes
from ...common.errors import UserError

MethodName = Literal["MM-LG", "TLEG", "He-LG"]

OWNERS = (*TOWERS, "multimodal")
"""Owners of MM-LG's blocks: one tower, or both."""
GROUPS = (1, 2)
"""Groups of MM-LG's blocks, between which pairs alternate."""
TERMS = ("base", "slope")
"""Blocks of a tower in TLEG."""
LAST_LAYERS = 3
"""Layers of a tower in He-LG."""


class MMLGRule:
    """MM-LG: descendants of L / 2 to L layers, where L is the depth of the auxiliary."""

    sets_whole_tower = True

    def shapes(self, sizes: LearngeneSizes) -> Shapes:
        """Return the shapes of the learngene's tensors by name."""
        pairs = number_of_pairs(sizes)
        shapes = with_prefixes(
            sizes.linear_shapes(), [f"blocks.{owner}.{group}" for owner in OWNERS for group in GROUPS]
        )
        shapes |= with_prefixes(sizes.norm_shapes(), [f"norms.{tower}" for tower in TOWERS])
        for tower in TOWERS:
            shapes |= {f"coefficients.{tower}": (pairs,), f"coefficients.{tower}_multimodal": (pairs,)}
        return shapes | sizes.end_shapes()

    def layers(
        self,
        tensors: Mapping[str, Tensor],
        tower: Tower,
        depth: int,
        sizes: LearngeneSizes,
        components: Components = "both",
    ) -> Sequence[Layer]:
        """Return the layers of a descendant's tower."""
        norms = tensors_below(tensors, f"norms.{tower}.")
        pairs = descendant_pairs(depth, sizes.layers // 2)
        return [norms | layer_sum(tensors, tower, pair, components) for pair in pairs]


class TLEGRule:
    """TLEG: descendants of any depth."""

    sets_whole_tower = True

    def shapes(self, sizes: LearngeneSizes) -> Shapes:
        """Return the shapes of the learngene's tensors by name."""
        blocks = [f"blocks.{tower}.{term}" for tower in TOWERS for term in TERMS]
        return with_prefixes({**sizes.linear_shapes(), **sizes.norm_shapes()}, blocks) | sizes.end_shapes()

    def layers(
        self,
        tensors: Mapping[str, Tensor],
        tower: Tower,
        depth: int,
        sizes: LearngeneSizes,
        components: Components = "both",
    ) -> Sequence[Layer]:
        """Return the layers of a descendant's tower."""
        _refuse_components("TLEG", components)
        if depth < 1:
            raise UserError(f"Expected a tower of at least 1 layer, got {depth}: build the network deeper.")
        return [linear_layer(tensors, tower, layer, depth) for layer in range(depth)]


class HeLGRule:
    """He-LG: descendants of at least three layers, of which the last three are set."""

    sets_whole_tower = False

    def shapes(self, sizes: LearngeneSizes) -> Shapes:
        """Return the shapes of the learngene's tensors by name."""
        layers = [f"layers.{tower}.{layer}" for tower in TOWERS for layer in range(LAST_LAYERS)]
        return with_prefixes({**sizes.linear_shapes(), **sizes.norm_shapes()}, layers)

    def layers(
        self,
        tensors: Mapping[str, Tensor],
        tower: Tower,
        depth: int,
        sizes: LearngeneSizes,
        components: Components = "both",
    ) -> Sequence[Layer]:
        """Return the layers of a descendant's tower."""
        _refuse_components("He-LG", components)
        if depth < LAST_LAYERS:
            raise UserError(
                f"Expected a tower of at least the {LAST_LAYERS} layers of He-LG, got {depth}: build the network "
                "deeper."
            )
        unchanged: list[Layer] = [{} for _ in range(depth - LAST_LAYERS)]
        return unchanged + [tensors_below(tensors, f"layers.{tower}.{layer}.") for layer in range(LAST_LAYERS)]


RULES: dict[MethodName, Rule] = {"MM-LG": MMLGRule(), "TLEG": TLEGRule(), "He-LG": HeLGRule()}
for _method, _rule in RULES.items():
    register_rule(_method, _rule)


def number_of_pairs(sizes: LearngeneSizes) -> int:
    """Return the number of distinct layers of each tower of an auxiliary.

    Raises:
        UserError: If the number of layers is odd.
    """
    if sizes.layers % 2:
        raise UserError(f"Expected an even number of layers, which come in pairs, got {sizes.layers}: change it.")
    return sizes.layers // 2


def group_of(pair: int) -> int:
    """Return the group whose blocks make up a pair, 1 or 2."""
    return GROUPS[pair % len(GROUPS)]


def descendant_pairs(depth: int, pairs: int = 6) -> list[int]:
    """Return the pair that each layer of a descendant is initialized from.

    Args:
        depth: number of layers of the descendant; with `2 * pairs` layers it is the auxiliary itself.
        pairs: number of pairs of the auxiliary.

    Returns:
        The number of a pair for each layer: all pairs in order, the first `depth - pairs` of them twice.

    Raises:
        UserError: If there is no such descendant.
    """
    if not pairs <= depth <= 2 * pairs:
        raise UserError(
            f"Expected a tower of {pairs} to {2 * pairs} layers, which the learngene expands to, got {depth}: build "
            "the network with such a depth."
        )
    return [pair for pair in range(pairs) for _ in range(2 if pair < depth - pairs else 1)]


def layer_sum(tensors: Mapping[str, Tensor], tower: Tower, pair: int, components: Components = "both") -> Layer:
    """Return the linear maps of a pair's layers: c theta + c^m theta^m.

    Args:
        tensors: blocks and coefficients, by their names in a learngene.
        tower: which tower.
        pair: number of the pair, from 0.
        components: "unimodal" and "multimodal" keep one of the two terms, for ablations.

    Returns:
        New tensors with gradient, by `qkv.weight`, `qkv.bias`, `proj.weight` and so on.
    """
    owners = {"both": (tower, "multimodal"), "unimodal": (tower,), "multimodal": ("multimodal",)}[components]
    weights: Layer = {}
    for owner in owners:
        coefficient = tensors[f"coefficients.{tower if owner == tower else f'{tower}_multimodal'}"][pair]
        for name in (f"{linear}.{end}" for linear in LINEARS for end in ("weight", "bias")):
            term = coefficient * tensors[f"blocks.{owner}.{group_of(pair)}.{name}"]
            weights[name] = weights[name] + term if name in weights else term
    return weights


def linear_layer(tensors: Mapping[str, Tensor], tower: Tower, layer: int, depth: int) -> Layer:
    """Return a layer of TLEG: base + layer / depth * slope.

    Args:
        tensors: blocks, by their names in a learngene.
        tower: which tower.
        layer: number of the layer, from 0.
        depth: number of layers of the tower.

    Returns:
        New tensors with gradient.
    """
    base, slope = (tensors_below(tensors, f"blocks.{tower}.{term}.") for term in TERMS)
    return {name: tensor + layer / depth * slope[name] for name, tensor in base.items()}


def _refuse_components(method: str, components: Components) -> None:
    if components != "both":
        raise UserError(
            f"Expected components both, since the layers of {method} are not sums of a unimodal and a multimodal "
            f"block, got {components!r}: leave components out."
        )
