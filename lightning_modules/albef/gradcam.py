"""Where in an image a word looks: Grad-CAM of the fusion encoder's cross-attention (Selvaraju et al., 1610.02391).

The attention weights are not to be had from a forward pass, because the fused kernels never write them down. They are
computed again for the one layer that is asked for, from its queries and keys; and since that layer's context is
weights times values, the gradient of the weights follows from the gradient of the context.

Shapes: B pairs, L text tokens, N image tokens (CLS first), D text width, H heads, g patches along a side.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
    """Weight every patch by how much the attention of a token to it speaks for the match of text and image.

    A map is the cross-attention of a token times the gradient, where positive, of the logit of a match, averaged over
    the heads. No parameter's `grad` changes. Call it in eval mode: dropout would draw.

    Args:
        network: the networks.
        itm_head: matching head, fused CLS state to two logits, of which the second is the match.
        image: [B, 3, S, S].
        input_ids: long [B, L].
        attention_mask: [B, L], 1 for tokens and 0 for padding.
        layer: index, text layers counted, of the fusion layer to look at, any but the last. By default the middle one,
            in the paper's model 8 of 0 to 11, as with the authors.

    Returns:
        [B, L, g, g], in float32 at least; zero at padding.

    Raises:
        ValueError: if the layer has no cross-attention or is the last, or there is only one.
    """
    attention = _cross_attention(network.text_encoder, layer)
    # An evaluation of Lightning is in inference mode, which knows no gradient.
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
    # What words see in the last layer stays with them: the matching head reads [CLS] alone.
    first, last = encoder.fusion_layer, len(encoder.layers) - 1
    if first == last:
        raise ValueError(
            "With one fusion layer nothing that a word sees reaches the matching head, so there are no maps of words: "
            "build the model with two or more."
        )
    if layer is None:
        layer = (first + last) // 2
    if not first <= layer < last:
        raise ValueError(
            f"Layer {layer} has no map of words, which takes cross-attention and a layer above that brings what words "
            f"see to the matching head: give one from {first} to {last - 1}."
        )
    fusion: Any = encoder.layers[layer]
    attention: CrossAttention = fusion.crossattention
    return attention


@contextmanager
def _recording(attention: CrossAttention) -> Iterator[dict[str, Tensor]]:
    """Collect query, key, value and context [B, L or N, D] of the forward pass; a gradient ends at the context."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = output.detach()

        return hook

    def keep_context(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        context, *rest = inputs
        seen["context"] = context.detach().requires_grad_()
        return seen["context"], *rest

    hooks = [attention.self[name].register_forward_hook(keep(name)) for name in ("query", "key", "value")]
    hooks.append(attention.output.register_forward_pre_hook(keep_context))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
