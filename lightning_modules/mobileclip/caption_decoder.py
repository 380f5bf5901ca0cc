"""Decoding of open_clip's CoCa: next-token logits with a key-value cache, and nucleus sampling of tokens.

Shapes: N images, n captions of each, R = N * n rows, T image tokens, D width, H heads, L positions, V vocabulary.
"""

from typing import Any

import torch
from open_clip.transformer import ResidualAttentionBlock
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.precision import at_least_float32

_LIKELY = 1024
"""Tokens that nucleus sampling sorts first: sorting all 49,408 would take most of the time."""


class CachedDecoder:
    """Next-token logits of a CoCa for n captions of each image, token by token.

    Keys and values of earlier tokens are cached; those of the image tokens are shared by the captions of an image.

    Args:
        network: a CoCa, in eval mode.
        image_tokens: outputs of its image tower, [N, T, D].
    """

    def __init__(self, network: Any, image_tokens: Tensor) -> None:
        self._text = network.text
        self._decoder = network.text_decoder
        self._projection = at_least_float32(network.text_decoder.text_projection)
        self._position = 0
        self._text_blocks = [_CausalBlock(block) for block in network.text.transformer.resblocks]
        self._decoder_blocks = [_CausalBlock(block) for block in network.text_decoder.resblocks]
        self._cross_blocks = [_CrossBlock(block, image_tokens) for block in network.text_decoder.cross_attn]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to every caption.

        CoCa's class token is left out, since no other token attends to it.

        Args:
            tokens: ids [N, n].

        Returns:
            Logits of the next tokens, [N, n, V], in float32 at least.
        """
        text, decoder = self._text, self._decoder
        x = text.token_embedding(tokens) + text.positional_embedding[self._position]
        self._position += 1
        for block in self._text_blocks:
            x = block(x)
        if text.cls_emb is None:
            x = text.ln_final(x)
        for block, cross_block in zip(self._decoder_blocks, self._cross_blocks, strict=True):
            x = cross_block(block(x))
        # Logits in half precision would be rounded by several percent of a probability.
        with torch.autocast(x.device.type, enabled=False):
            return decoder.ln_final(x).to(self._projection.dtype) @ self._projection


class _CausalBlock:
    """A block with causal attention, which caches keys and values [R, H, L, D / H]."""

    def __init__(self, block: ResidualAttentionBlock) -> None:
        self._block = block
        self._past: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[N, n, D] to [N, n, D]."""
        block = self._block
        query, keys, values = _project(block.attn, block.ln_1(x).flatten(0, 1)[:, None], 0, 3)
        if self._past is not None:
            keys, values = torch.cat((self._past[0], keys), 2), torch.cat((self._past[1], values), 2)
        self._past = keys, values
        return _rest(block, x, _attend(block.attn, query, keys, values).view_as(x))


class _CrossBlock:
    """A block with cross-attention of the n captions of an image to its image tokens."""

    def __init__(self, block: ResidualAttentionBlock, image_tokens: Tensor) -> None:
        self._block = block
        self._keys, self._values = _project(block.attn, block.ln_1_kv(image_tokens), 1, 3)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, n, D] to [N, n, D]."""
        block = self._block
        (query,) = _project(block.attn, block.ln_1(x), 0, 1)
        return _rest(block, x, _attend(block.attn, query, self._keys, self._values))


def _project(attention: nn.MultiheadAttention, x: Tensor, start: int, stop: int) -> list[Tensor]:
    """Project [B, L, D] to query, key and value (0, 1, 2) from `start` to before `stop`, each [B, H, L, D / H]."""
    rows = slice(start * attention.embed_dim, stop * attention.embed_dim)
    projected = F.linear(x, attention.in_proj_weight[rows], attention.in_proj_bias[rows])
    return list(projected.unflatten(-1, (stop - start, attention.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind())


def _attend(attention: nn.MultiheadAttention, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from queries [B, H, L, D / H] to all keys, and return [B, L, D]."""
    return attention.out_proj(F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(2))


def _rest(block: ResidualAttentionBlock, x: Tensor, attended: Tensor) -> Tensor:
    """Apply the residual connections and the MLP of a block after its attention."""
    x = x + block.ls_1(attended)
    return x + block.ls_2(block.mlp(block.ln_2(x)))


def draw(logits: Tensor, uniform: Tensor, top_p: float, temperature: float) -> Tensor:
    """Draw tokens by inverting their cumulative distribution, which is robust to rounding of the logits.

    Args:
        logits: [..., V].
        uniform: float64 random numbers in [0, 1), [...].
        top_p: as in `Captioner`.
        temperature: as in `Captioner`.

    Returns:
        Token ids, long [...].
    """
    probabilities = (top_p_filtered(logits, top_p) / temperature).softmax(-1, dtype=torch.float64)
    distribution = probabilities.cumsum(-1)
    # In (0, sum], where the sum need not be 1, so that no token of probability 0 is drawn.
    target = (1 - uniform)[..., None] * distribution[..., -1:]
    return torch.searchsorted(distribution, target)[..., 0]


def top_p_filtered(logits: Tensor, top_p: float) -> Tensor:
    """Return logits [..., V] with -inf for all but the most likely tokens, of cumulative probability `top_p`."""
    if logits.shape[-1] > _LIKELY:
        largest, tokens = logits.topk(_LIKELY)
        probabilities = (largest.double() - logits.double().logsumexp(-1, keepdim=True)).exp()
        likelier = probabilities.cumsum(-1) - probabilities
        if bool((likelier[..., -1] >= top_p).all()):  # no other token is kept
            kept = largest.masked_fill(likelier >= top_p, -torch.inf)
            return torch.full_like(logits, -torch.inf).scatter(-1, tokens, kept)
    ascending, order = logits.sort(dim=-1, stable=True)
    dropped = ascending.softmax(-1, dtype=torch.float64).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
