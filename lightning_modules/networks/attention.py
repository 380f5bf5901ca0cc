"""Scaled dot-product attention by the implementation that is faster on the device: fused, or two matrix products."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import AttentionInterface

from ..core.counting import attends_as_gpu

# On a CPU the backward pass of the fused kernel costs 2 to 9 times that of two matrix products in 16 bits, and 1 to 1.3
# times in float32 (measured at 16 to 197 keys, `benchmarks/attention.py`). For longer sequences the matrices that it
# avoids get large, and in float32 the fused kernel is not slower.
_LONGEST_EXPLICIT = {2: 256, 4: 128, 8: 128}  # keys by bytes of a number


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Compute softmax attention.

    Args:
        query: [B, H, L, D].
        key: [B, H, N, D].
        value: [B, H, N, D].
        mask: boolean, broadcast to [B, H, L, N]; false hides a key.
        dropout: dropout probability of the attention weights.

    Returns:
        [B, H, L, D].
    """
    if _fused(query.device, query.dtype, key.shape[-2]):
        return F.scaled_dot_product_attention(query, key, value, mask, dropout)
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def set_vit_attention(encoder: VisionTransformer, image: Tensor) -> None:
    """Make a timm ViT use the implementation that `attend` would choose for a batch of images."""
    # The precision matters only on a CPU.
    computed_in = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else image.dtype
    fused = _fused(image.device, computed_in, encoder.pos_embed.shape[1])
    for block in encoder.blocks:
        block.attn.fused_attn = fused


class SelfAttention(nn.MultiheadAttention):
    """torch's multi-head self-attention, computed by `attend`, with the same parameters.

    On a CPU, with a frozen network under autocast, torch's own copies the projection once per position of the sequence,
    which takes twenty times as long, and its fused kernel is slow in the backward pass (`benchmarks/attention.py`).
    """

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend, as torch's module does, without returning attention weights.

        Args:
            query: tokens [B, L, V].
            key: the same tensor.
            value: the same tensor.
            need_weights: not used.
            attn_mask: additive, of 0 and -inf: [L, L] or [B x heads, L, L].
        """
        visible = None if attn_mask is None else attn_mask == 0
        if visible is not None and visible.dim() == 3:
            visible = visible.unflatten(0, (-1, self.num_heads))
        qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        query, key, value = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, L, D]
        attended = attend(query, key, value, visible)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


def set_clip_attention(network: nn.Module) -> None:
    """Make the self-attention of open_clip's towers use `attend`; state dicts do not change."""
    from open_clip.transformer import ResidualAttentionBlock

    for block in network.modules():
        # Attention pooling, with one query, is not changed.
        if isinstance(block, ResidualAttentionBlock) and not hasattr(block, "ln_1_kv") and block.attn.batch_first:
            block.attn.__class__ = SelfAttention


def _fused(device: torch.device, dtype: torch.dtype, keys: int) -> bool:
    return attends_as_gpu(device) or not torch.is_grad_enabled() or keys > _LONGEST_EXPLICIT[dtype.itemsize]


def _bert_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Call `attend` with the signature of transformers: it returns [B, L, H, D] and no attention weights."""
    return attend(query, key, value, attention_mask, dropout).transpose(1, 2).contiguous(), None


BERT_ATTENTION = "vlightning"
"""Name of `attend` among the attention implementations of `transformers`."""
AttentionInterface.register(BERT_ATTENTION, _bert_attention)
