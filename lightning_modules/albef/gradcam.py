"""Grad-CAM of the fusion encoder's cross-attention (Selvaraju et al., arXiv 1610.02391): patches relevant to a word.

Fused attention kernels do not return attention weights. They are recomputed for one layer from its queries and keys;
since the layer's context is weights times values, the gradient of the weights follows from the gradient of the context.

Shapes: B pairs, L text tokens, N image tokens (CLS first), D text width, H heads, g patches along a side.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import UserError
from ..core.precision import at_least_float32
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
        UserError: If the layer has no cross-attention or is the last, or there is only one.
    """
    attention = cross_attention(network.text_encoder, layer, of_words=True)
    # Lightning evaluates in inference mode, which has no gradients.
    with torch.inference_mode(False):
        with torch.no_grad():
            image_tokens = network.encode_image(image)
            states = network.encode_text(input_ids, attention_mask)
        return token_maps(network, itm_head, attention, image_tokens, states, attention_mask)


def token_maps(
    network: ALBEFNetwork,
    itm_head: nn.Module,
    attention: CrossAttention,
    image_tokens: Tensor,
    states: Tensor,
    attention_mask: Tensor,
) -> Tensor:
    """Return the maps of `word_maps` [B, L, g, g] for encoded images [B, N, V] and text states [B, L, D].

    Called outside of inference mode, with tensors that were made outside of it.
    """
    with torch.enable_grad(), recording(dict(attention.self.items()), attention.output) as record:
        fused = network.fuse(states, attention_mask, image_tokens)
        match = at_least_float32(itm_head(fused[:, 0]))[:, 1].sum()
        (gradient,) = torch.autograd.grad(match, record["context"])
    maps = relevance(record["query"], record["key"], record["value"], gradient, attention.heads)
    return maps.unflatten(-1, network.visual_encoder.patch_embed.grid_size)


def relevance(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, heads: int) -> Tensor:
    """Return attention weights times the positive part of their gradient, averaged over the heads, without CLS.

    Args:
        query: [B, L, D].
        key: [B, N, D].
        value: [B, N, D].
        gradient: [B, L, D], of the attention's context, which is weights times values.
        heads: attention heads.

    Returns:
        [B, L, N - 1], in float32 at least.
    """
    query, key, value, gradient = (
        at_least_float32(tensor).unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, L or N, D/H]
        for tensor in (query, key, value, gradient)
    )
    with torch.autocast(query.device.type, enabled=False):
        weights = (query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)).softmax(-1)  # [B, H, L, N]
        weights_gradient = gradient @ value.transpose(-1, -2)
    return (weights * weights_gradient.clamp(min=0)).mean(1)[:, :, 1:]


def cross_attention(encoder: FusionBert, layer: int | None, of_words: bool) -> CrossAttention:
    """Return the cross-attention of a layer, by default of the middle fusion layer.

    Args:
        encoder: the text and fusion encoder.
        layer: index of the fusion layer, counted from the first text layer.
        of_words: whether every token's attention must reach the matching head. It uses [CLS] only, so that in the
            last layer the attention of words has no influence on the logit.

    Raises:
        UserError: If there is no such layer.
    """
    lowest = encoder.fusion_layer
    highest = len(encoder.layers) - 1
    layers = range(lowest, highest + (not of_words))
    if not layers:
        raise UserError(
            "Expected two or more fusion layers for word maps, got one, whose attention of words does not reach the "
            "matching head: raise model.text.fusion_depth."
        )
    if layer is None:
        layer = (lowest + highest) // 2
    if layer not in layers:
        condition = ", whose attention of words reaches the matching head" if of_words else ""
        raise UserError(
            f"Expected a fusion layer from {layers[0]} to {layers[-1]}{condition}, got layer {layer}: correct it."
        )
    fusion: Any = encoder.layers[layer]
    attention: CrossAttention = fusion.crossattention
    return attention


@contextmanager
def recording(projections: Mapping[str, nn.Module], output: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the attention of a forward pass: its projections and its context; gradients end at the context.

    Args:
        projections: layers whose outputs are recorded, by name.
        output: layer whose first input is the context.
    """
    record: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            record[name] = output.detach()

        return hook

    def keep_context(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        record["context"] = inputs[0].detach().requires_grad_()
        return record["context"], *inputs[1:]

    hooks = [projection.register_forward_hook(keep(name)) for name, projection in projections.items()]
    hooks.append(output.register_forward_pre_hook(keep_context))
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()
