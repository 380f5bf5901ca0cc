"""SHRe's shared encoders, which map the tokens of images and of texts into one space.

Shapes: B samples, T tokens (class token or [CLS] first), width D, C classes.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Literal

import torch
from timm.models.beit import Block as BeitBlock
from torch import Tensor, nn

from ..core.memory import recomputed
from ..networks.initial import init_linear

Shared = Literal["mlp", "mlp_in_order", "transformer", "s_smke"]
Layer = nn.Module | nn.Parameter
_EPS = 1e-6
_STD = 0.02
"""Standard deviation of the initial matrices (thesis)."""


class SharedMLP(nn.Module):
    """The shared encoder of the thesis: h1 = W1 x, h2 = W2 LN(GELU(h1)), h3 = W3 LN(h2).

    The results are [h2, h1, h3], whose widths (768, 3072, 1000) are in the order of listing 2 of September 2024; later
    revisions have (3072, 768, 1000). The losses treat the first two alike, so this is the network that the thesis
    trained, with 5,499,112 parameters.

    Args:
        width: width D of a token.
        classes: number of classes C.
        in_order: read the listing's widths as those of consecutive layers instead, h1 of 768 and h2 of 3072. (No such
            network was trained.)
    """

    def __init__(self, width: int, classes: int, in_order: bool = False) -> None:
        super().__init__()
        h1_width, h2_width = (width, 4 * width) if in_order else (4 * width, width)
        self.fc1 = nn.Linear(width, h1_width)
        self.norm1 = nn.LayerNorm(h1_width, eps=_EPS)
        self.fc2 = nn.Linear(h1_width, h2_width)
        self.norm2 = nn.LayerNorm(h2_width, eps=_EPS)
        self.head = nn.Linear(h2_width, classes)
        names = ("h1", "h2") if in_order else ("h2", "h1")
        self.widths = dict(zip((*names, "h3"), (width, 4 * width, classes), strict=True))
        self.contrasted = tuple(self.widths)
        self.apply(partial(init_linear, std=_STD))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Map the first of the tokens [B, T, D] to the three results [B, ...]."""
        h1 = self.fc1(tokens[:, 0])
        # The input of the second layer is recomputed in the backward pass, as in `LeanMlp`.
        h2 = recomputed(self._second_layer, h1)
        results = {"h1": h1, "h2": h2, "h3": self.head(self.norm2(h2))}
        return tuple(results[name] for name in self.widths)

    def layers(self) -> dict[str, list[Layer]]:
        """Return the consecutive layers by the result that they compute."""
        return {"h1": [self.fc1], "h2": [self.norm1, self.fc2], "h3": [self.norm2, self.head]}

    def _second_layer(self, h1: Tensor) -> Tensor:
        h2: Tensor = self.fc2(self.norm1(nn.functional.gelu(h1)))
        return h2


class SharedTransformer(nn.Module):
    """The later shared encoder: one Transformer layer over all tokens, a norm and a classifier.

    The results are [h2, h3]: the first token after the layer [B, D], which is contrasted, and the logits. The layer is
    BEiT's: pre-norm, LayerScale initialized with 0.2, keys without bias. 7,859,176 parameters at the thesis' sizes.

    Args:
        width: width D of a token.
        heads: number of attention heads.
        classes: number of classes C.
    """

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=_EPS)
        self.layer = BeitBlock(width, heads, qkv_bias=True, init_values=0.2, norm_layer=norm)
        self.norm = norm(width)
        self.head = nn.Linear(width, classes)
        self.widths = {"h2": width, "h3": classes}
        self.contrasted: tuple[str, ...] = ("h2",)
        self.apply(partial(init_linear, std=_STD))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Map tokens [B, T, D], with the mask [B, T] of a text, to the two results [B, ...]."""
        bias = None
        if attention_mask is not None:
            bias = torch.zeros_like(attention_mask, dtype=tokens.dtype)
            bias = bias.masked_fill(attention_mask == 0, torch.finfo(tokens.dtype).min)[:, None, None, :]
        return self._results(tokens, bias)

    def _results(self, tokens: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Map tokens [B, T, D] to the results, with the bias [B, 1, 1, T] of the attention's logits for a text."""
        h2 = self.layer(tokens, shared_rel_pos_bias=bias)[:, 0]
        return h2, self.head(self.norm(h2))

    def layers(self) -> dict[str, list[Layer]]:
        """Return the consecutive layers by the result that they compute."""
        return {"h2": [self.layer], "h3": [self.norm, self.head]}


class _FirstTokenBlock(BeitBlock):
    """BEiT's layer for the first token, with the output of the MLP's first linear layer."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map tokens [B, T, D] to the first one after the layer [B, D], and to its hidden values [B, 4 D]."""
        x = x + self.gamma_1 * self.attn(self.norm1(x), shared_rel_pos_bias=shared_rel_pos_bias)
        token = x[:, 0]
        hidden = self.mlp.fc1(self.norm2(token))
        return token + self.gamma_2 * self.mlp.fc2(self.mlp.act(hidden)), hidden


class SMKETransformer(SharedTransformer):
    """S-SMKE's shared encoder: the Transformer layer after an embedding of the token's type, with one more result.

    A vector for images or for texts, times a LayerScale that starts at 1e-5, is added to each token (thesis, section
    Token-Type Embeddings). The results are [h2, h1, h3]: h1 [B, 4 D], from the first linear layer of the layer's MLP,
    before its activation, is contrasted too (section Self-Supervised Teacher); h3 predicts the teacher's embedding.

    Args:
        width: width D of a token.
        heads: number of attention heads.
        classes: embedding dimension of the teacher, or number of its classes.
    """

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__(width, heads, classes)
        norm = partial(nn.LayerNorm, eps=_EPS)
        self.layer = _FirstTokenBlock(width, heads, qkv_bias=True, init_values=0.2, norm_layer=norm)
        self.layer.apply(partial(init_linear, std=_STD))
        self.type_embeddings = nn.Embedding(2, width)  # of texts, of images
        nn.init.normal_(self.type_embeddings.weight, std=_STD)
        self.type_scale = nn.Parameter(torch.full((width,), 1e-5))
        self.widths = {"h2": width, "h1": 4 * width, "h3": classes}
        self.contrasted = ("h2", "h1")

    def _results(self, tokens: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        token_type = self.type_embeddings.weight[int(bias is None)]  # only texts have a mask
        h2, h1 = self.layer(tokens + self.type_scale * token_type, shared_rel_pos_bias=bias)
        return h2, h1, self.head(self.norm(h2))

    def layers(self) -> dict[str, list[Layer]]:
        """Return the consecutive layers by the result that they compute."""
        return {"h1": [self.layer], "h2": [self.layer.mlp.fc2, self.layer.gamma_2], "h3": [self.norm, self.head]}


def layers_after(layers: Mapping[str, list[Layer]], results: Collection[str]) -> list[Layer]:
    """Return the layers on which none of some results depends, of consecutive layers by the result they compute."""
    names = list(layers)
    last = max(map(names.index, results))
    return [layer for name in names[last + 1 :] for layer in layers[name]]
