"""The unimodal encoders' part of a step: a batch becomes tokens, states and contrastive features (section 3.1).

Shapes: B pairs, N image tokens (CLS first), V image width, L text tokens (CLS first), D text width, E embedding
dimension.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.memory import in_slices
from ..evaluation.protocol import Batch
from .network import ALBEFNetwork


class Encoded(NamedTuple):
    """A batch after the unimodal encoders of one model."""

    image_tokens: Tensor  # [B, N, V]
    text_states: Tensor  # [B, L, D]
    masked_states: Tensor | None  # [B, L, D] of the masked texts, if there are any
    image_features: Tensor  # [B, E], unit length
    text_features: Tensor  # [B, E], unit length


def encode(network: ALBEFNetwork, batch: Batch, masked_ids: Tensor | None, slice_rows: int | None) -> Encoded:
    """Encode the images, the texts and the masked texts of a batch.

    Args:
        network: student or teacher.
        batch: `image` [B, 3, S, S], `input_ids` and `attention_mask` [B, L].
        masked_ids: long [B, L], the texts with masked words; None without masked language modelling.
        slice_rows: pairs that are encoded at a time; None for all at once.
    """

    def encode_rows(image: Tensor, mask: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
        # Texts and masked texts go through the text layers as one batch.
        states = network.encode_text(torch.cat(texts), mask.repeat(len(texts), 1))
        return network.encode_image(image), *states.chunk(len(texts))

    texts = [batch["input_ids"]] if masked_ids is None else [batch["input_ids"], masked_ids]
    encoded = in_slices(encode_rows, slice_rows, batch["image"], batch["attention_mask"], *texts)
    image_tokens, text_states = encoded[:2]
    return Encoded(
        image_tokens,
        text_states,
        None if masked_ids is None else encoded[2],
        network.project_image(image_tokens),
        network.project_text(text_states),
    )
