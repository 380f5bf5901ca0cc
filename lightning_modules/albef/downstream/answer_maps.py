"""Grad-CAM maps of the image regions that an answer depends on; see `gradcam.py`."""

import torch
from torch import Tensor

from ..gradcam import cross_attention, recording, relevance
from .answers import Answers, Questions, target_places, token_logits
from .vqa_network import VQANetwork


def answer_maps(
    network: VQANetwork,
    image: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    answer_ids: Tensor,
    pad_token: int,
    layer: int | None = None,
) -> Tensor:
    """Map answers to the patches whose attention, by any word of the question, increases the answer's probability.

    Args:
        network: the networks, in eval mode.
        image: [B, 3, S, S].
        input_ids: long [B, Lq].
        attention_mask: [B, Lq].
        answer_ids: long [B, L], [CLS], words, [SEP], padding.
        pad_token: id of the padding.
        layer: index of the fusion layer, counted from the first text layer; by default the middle one.

    Returns:
        [B, g, g], the mean over the question's tokens, in float32 at least.
    """
    attention = cross_attention(network.text_encoder, layer, of_words=False)
    mask = (answer_ids != pad_token).long()
    owner = torch.arange(len(image), device=image.device)
    # Lightning evaluates in inference mode, which has no gradients.
    with torch.inference_mode(False):
        image, input_ids, attention_mask, answer_ids, mask, owner = (
            part.clone() for part in (image, input_ids, attention_mask, answer_ids, mask, owner)
        )
        answers = Answers(answer_ids, mask, owner, mask[:, 0].float(), target_places(mask))
        with torch.no_grad():
            tokens = network.encode_image(image)
        with torch.enable_grad(), recording(dict(attention.self.items()), attention.output) as seen:
            states = network.encode_text(input_ids, attention_mask, tokens)
            logits = token_logits(network, Questions(states, attention_mask), answers)
            targets = answer_ids[:, 1:].flatten()[answers.places]
            log_probability = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
            (gradient,) = torch.autograd.grad(log_probability, seen["context"])
        found = relevance(seen["query"], seen["key"], seen["value"], gradient, attention.heads)  # [B, Lq, N - 1]
        kept = attention_mask[:, :, None].to(found.dtype)
        maps: Tensor = (found * kept).sum(1) / kept.sum(1)
        return maps.unflatten(-1, network.visual_encoder.patch_embed.grid_size)
