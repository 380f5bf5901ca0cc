"""Grad-CAM of the fusion encoder's cross-attention (Selvaraju et al., arXiv 1610.02391): patches relevant to a word.

Fused attention kernels do not return attention weights. They are recomputed for one layer from its queries and keys;
since the layer's context is weights times values, the gradient of the weights follows from the gradient of the context.

Shapes: B pairs, L text tokens, N image tokens (CLS first), D text width, H heads, g patches along a side.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import UserError
from ..networks.precision import at_least_float32
from .network import ALBEFNetwork, CrossAttention, FusionBert


def word_maps(
    network: ALBEFNetwork,
    itm_head: nn.Module,
    image: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    layer: int | None = None,
) -> Tensor:
    """Map every token to the patches whose attention increases the logit of a match.

    A map is the cross-attention of a token times the positive part of that logit's gradient, averaged over the heads.
    No parameter's `grad` changes. Call it in eval mode, without dropout.

    Args:
        network: the networks.
        itm_head: matching head, fused CLS state to two logits, of which the second is the match.
        image: [B, 3, S, S].
        input_ids: long [B, L].
        attention_mask: [B, L], 1 for tokens and 0 for padding.
        layer: index of the fusion layer, counted from the first text layer; any but the last. By default the middle
            one, in the paper's model 8 of 0 to 11, as in the authors' code.

    Returns:
        [B, L, g, g], in float32 at least; zero at padding.

    Raises:
        UserError: if the layer has no cross-attention or is the last, or there is only one.
    """
    attention = _cross_attention(network.text_encoder, layer)
    # Lightning evaluates in inference mode, which has no gradients.
    with torch.inference_mode(False):
        with torch.no_grad():
            image_tokens = network.encode_image(image)
            states = network.encode_text(input_ids, attention_mask)
        with torch.enable_grad(), _recording(attention) as seen:
            fused = network.fuse(states, attention_mask, image_tokens)
            match = at_least_float32(itm_head(fused[:, 0]))[:, 1].sum()
            (gradient,) = torch.autograd.grad(match, seen["context"])
        query, key, value, gradient = (
            at_least_float32(part).unflatten(-1, (attention.heads, -1)).transpose(1, 2)  # [B, H, L or N, D/H]
            for part in (seen["query"], seen["key"], seen["value"], gradient)
        )
        with torch.autocast(image.device.type, enabled=False):
            weights = (query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)).softmax(-1)  # [B, H, L, N]
            weights_gradient = gradient @ value.transpose(-1, -2)
        maps = (weights * weights_gradient.clamp(min=0)).mean(1)[:, :, 1:]
        return maps.unflatten(-1, network.visual_encoder.patch_embed.grid_size)


def _cross_attention(encoder: FusionBert, layer: int | None) -> CrossAttention:
    # The matching head uses [CLS] only, so the last layer's attention of words has no influence on the logit.
    first, last = encoder.fusion_layer, len(encoder.layers) - 1
    if first == last:
        raise UserError(
            "Expected two or more fusion layers for word maps, got one, whose attention of words does not reach the "
            "matching head: raise model.text.fusion_depth."
        )
    if layer is None:
        layer = (first + last) // 2
    if not first <= layer < last:
        raise UserError(
            f"Expected a fusion layer below the last one, got layer {layer}, whose attention of words does not reach "
            f"the matching head: give one from {first} to {last - 1}."
        )
    fusion: Any = encoder.layers[layer]
    attention: CrossAttention = fusion.crossattention
    return attention


@contextmanager
def _recording(attention: CrossAttention) -> Iterator[dict[str, Tensor]]:
    """Record query, key, value and context [B, L or N, D] of the forward pass; gradients end at the context."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = output.detach()

        return hook

    def keep_context(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen["context"] = inputs[0].detach().requires_grad_()
        return seen["context"], *inputs[1:]

    hooks = [attention.self[name].register_forward_hook(keep(name)) for name in ("query", "key", "value")]
    hooks.append(attention.output.register_forward_pre_hook(keep_context))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
