"""Layers of a transformer by their names in a learngene, and the rules by which methods compute them.

A method registers its rule with `register_rule`. A learngene's file names the module that does so, which is imported
when the file is read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Literal, Protocol

from torch import Tensor

from ...common.errors import UserError
from .sizes import LearngeneSizes, Shapes

Tower = Literal["vision", "text"]
Components = Literal["both", "unimodal", "multimodal"]
Layer = dict[str, Tensor]
"""Tensors of a layer, by `qkv.weight`, `qkv.bias`, `proj.weight` and so on, and `norm1.weight` to `norm2.bias`."""

TOWERS: tuple[Tower, ...] = ("vision", "text")


class Rule(Protocol):
    """Computation of the layers of a descendant from the tensors of a learngene.

    Attributes:
        sets_whole_tower: whether a learngene has every parameter of a tower, or those of some layers only.
    """

    sets_whole_tower: bool

    def shapes(self, sizes: LearngeneSizes) -> Shapes:
        """Return the shape of every tensor of a learngene, by name."""
        ...

    def layers(
        self,
        tensors: Mapping[str, Tensor],
        tower: Tower,
        depth: int,
        sizes: LearngeneSizes,
        components: Components = "both",
    ) -> Sequence[Layer]:
        """Return the initial layers of a descendant's tower, first to last.

        Args:
            tensors: the learngene's, by name.
            tower: which tower.
            depth: number of layers of the descendant's tower.
            sizes: of the network that the learngene was extracted from.
            components: "unimodal" and "multimodal" keep one term of each sum, for ablations.

        Returns:
            The tensors of each layer; an empty dict for a layer that keeps its own initial values.

        Raises:
            UserError: If the method has no descendant of that depth, or no such components.
        """
        ...


_PACKAGE = __name__.partition(".")[0]
_RULES: dict[str, Rule] = {}


def register_rule(method: str, rule: Rule) -> None:
    """Register the rule of a method."""
    _RULES[method] = rule


def rule_of(method: str, module: str = "") -> Rule:
    """Return the rule of a method.

    Args:
        method: its name.
        module: module that registers the rule; imported if it belongs to this package.

    Raises:
        UserError: If no rule is registered for the method.
    """
    if method not in _RULES and module.startswith(f"{_PACKAGE}."):
        import_module(module)
    if method not in _RULES:
        methods = " or ".join(_RULES) or "a registered method"
        raise UserError(
            f"Expected a learngene of {methods}, got one of {method!r}: import the module that registers its rule "
            "first."
        )
    return _RULES[method]


def tensors_below(tensors: Mapping[str, Tensor], prefix: str) -> Layer:
    """Return the tensors whose names start with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


Values = dict[str, list[float]]
"""Values of each distinct layer, by `vision`, `vision_multimodal`, `text` and `text_multimodal`."""


@dataclasses.dataclass(frozen=True)
class LearngeneTerms:
    """Coefficients of the sums, and how large the terms are.

    Args:
        coefficients: c of each term c * theta.
        norms: |c * theta|, over all weights and biases of the block theta.
    """

    coefficients: Values
    norms: Values
