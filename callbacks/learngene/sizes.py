"""Sizes of the CLIP that a learngene was extracted from, and the shapes that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated

from ...common.ranges import COUNT, SettingsGroup, check_heads, check_patches

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors, by name."""

LINEARS = ("qkv", "proj", "fc1", "fc2")
"""The linear maps of a layer."""
NORMS = ("norm1", "norm2")
"""The layer norms of a layer."""


@dataclasses.dataclass(frozen=True)
class LearngeneSizes(SettingsGroup):
    """Sizes of a CLIP with two towers of equal width and depth; the defaults are those of a ViT-S/16.

    Args:
        width: token dimension of both towers.
        heads: number of attention heads of both towers.
        layers: number of layers of each tower.
        embed_dim: embedding dimension.
        image_size: side of the square images, pixels.
        patch_size: side of a patch, pixels.
        max_tokens: length of the token sequences.
        vocab_size: number of tokens in the vocabulary.
    """

    width: Annotated[int, COUNT] = 384
    heads: Annotated[int, COUNT] = 6
    layers: Annotated[int, COUNT] = 12
    embed_dim: Annotated[int, COUNT] = 384
    image_size: Annotated[int, COUNT] = 224
    patch_size: Annotated[int, COUNT] = 16
    max_tokens: Annotated[int, COUNT] = 77
    vocab_size: Annotated[int, COUNT] = 49408

    def __post_init__(self) -> None:
        """Check that the sizes fit together.

        Raises:
            UserError: If they do not.
        """
        check_heads(self.width, self.heads)
        check_patches(self.image_size, self.patch_size)

    def linear_shapes(self) -> Shapes:
        """Return the shapes of a layer's linear maps."""
        width = self.width
        rows = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (4 * width, width), "fc2": (width, 4 * width)}
        shapes: Shapes = {}
        for name in LINEARS:
            shapes |= {f"{name}.weight": rows[name], f"{name}.bias": rows[name][:1]}
        return shapes

    def norm_shapes(self) -> Shapes:
        """Return the shapes of a layer's norms."""
        return {f"{name}.{end}": (self.width,) for name in NORMS for end in ("weight", "bias")}

    def end_shapes(self) -> Shapes:
        """Return the shapes of what a tower has before and after its layers, and of the logit scale."""
        width = self.width
        embed = self.embed_dim
        patches = (self.image_size // self.patch_size) ** 2
        return {
            "vision.class_embedding": (width,),
            "vision.positional_embedding": (patches + 1, width),
            "vision.conv1.weight": (width, 3, self.patch_size, self.patch_size),
            **_norm("vision.ln_pre", width),
            **_norm("vision.ln_post", width),
            "vision.proj": (width, embed),
            "text.token_embedding.weight": (self.vocab_size, width),
            "text.positional_embedding": (self.max_tokens, width),
            **_norm("text.ln_final", width),
            "text.text_projection": (width, embed),
            "logit_scale": (1,),
        }


def with_prefixes(shapes: Shapes, prefixes: Iterable[str]) -> Shapes:
    """Return the shapes once for each prefix of their names."""
    return {f"{prefix}.{name}": shape for prefix in prefixes for name, shape in shapes.items()}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
