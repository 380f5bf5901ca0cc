"""Image-text matching (ITM) with hard negatives: equation 4 of the paper.

Negatives are drawn by (seed, step, position in the global batch), without waiting for the device. Candidates are the
pairs of one process, or fixed groups of rows of the global batch (`contrast.negative_rows`).

Shapes: B pairs, N image tokens (CLS first), L text tokens (CLS first), D text width.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...callbacks.draws import draw_uniform, global_positions
from ...common.errors import UserError
from ..core.memory import in_slices
from ..core.precision import at_least_float32
from ..evaluation.protocol import Batch
from .itc import Contrast
from .losses import itm_loss, mean_count
from .network import ALBEFNetwork, Encoded
from .settings import ContrastSettings


class Negatives(NamedTuple):
    """One drawn negative per row."""

    row: Tensor  # long [B], the drawn row; a row without an admissible candidate holds its own index
    exists: Tensor  # boolean [B], whether the row has an admissible candidate


class HardNegatives(NamedTuple):
    """A negative image for every text, and a negative text for every image."""

    image: Negatives
    text: Negatives


class Fused(NamedTuple):
    """Output states of the fusion encoder."""

    cls: Tensor  # [B, 3, D] of [CLS]: the pair, the text with a negative image, the image with a negative text
    masked: Tensor | None  # [B, L, D] of the masked texts, if there are any


def draw_negatives(
    contrast: Contrast, batch: Batch, settings: ContrastSettings, hardness: float | Tensor = 1.0
) -> HardNegatives:
    """Draw negatives within the batch of this process, hard ones or evenly.

    Args:
        contrast: similarities of the batch.
        batch: `image_id` [B] and `input_ids` [B, L].
        settings: `negatives`; `negative_rows`; `positives`, of which "image_id" rules out pairs of the same image or of
            the same words, "diagonal" the pair itself alone.
        hardness: factor of the similarities, from 0, which draws evenly, to 1.

    Raises:
        UserError: If `negative_rows` does not divide the batch.
    """
    forbidden = forbidden_pairs(batch["image_id"], batch["input_ids"], settings.positives)
    if (rows := settings.negative_rows) is not None:
        if len(forbidden) % rows:
            raise UserError(
                f"Expected a batch of each process that contrast.negative_rows {rows} divides, got {len(forbidden)}: "
                "set another number."
            )
        group = torch.arange(len(forbidden), device=forbidden.device) // rows
        forbidden = forbidden | (group[:, None] != group)
    to_images = contrast.text_logits * hardness
    to_texts = contrast.image_logits * hardness
    if settings.negatives == "random":
        to_images = torch.zeros_like(to_images)
        to_texts = torch.zeros_like(to_texts)
    return HardNegatives(image=draw_hard_negatives(to_images, forbidden), text=draw_hard_negatives(to_texts, forbidden))


def forbidden_pairs(image_id: Tensor, input_ids: Tensor, positives: Literal["image_id", "diagonal"]) -> Tensor:
    """Return which pairs of rows cannot be negatives, boolean [B, B]; `positives` as in `ContrastSettings`."""
    forbidden = torch.eye(len(image_id), dtype=torch.bool, device=image_id.device)
    if positives == "image_id":
        same_text = (input_ids[:, None] == input_ids).all(-1)
        forbidden = forbidden | same_text | (image_id[:, None] == image_id)
    return forbidden


def draw_hard_negatives(similarity: Tensor, forbidden: Tensor) -> Negatives:
    """Draw one negative for each row with probability softmax(similarity) over the admissible columns (section 3.2).

    Forbidden pairs get -inf before the softmax. The authors set them to zero after the softmax, so that all
    probabilities can be zero when a low temperature makes the others underflow.

    Args:
        similarity: [B, B] logits; row = query, column = candidate. Rows of all processes are numbered as gathered.
        forbidden: boolean [B, B], true where the candidate matches the query. It must be true on the diagonal.
    """
    exists = ~forbidden.all(-1)
    logits = similarity.detach().float().masked_fill(forbidden, -torch.inf)
    diagonal = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    # A row without candidates draws itself, and `exists` removes it from the loss.
    logits = logits.masked_fill(diagonal & ~exists[:, None], 0.0)
    # Sample uniformly where logits are non-finite: the loss reports it, while an error here would kill a GPU process.
    chances = logits.softmax(-1).nan_to_num(nan=1.0)
    # The first of events with these rates: exponentially distributed times, the same on any number of processes.
    size = len(chances)
    device = chances.device
    race = chances / -draw_uniform(size, global_positions(size, device), device).log()
    return Negatives(race.argmax(-1), exists)


def fuse_pairs(
    network: ALBEFNetwork,
    encoded: Encoded,
    attention_mask: Tensor,
    negatives: HardNegatives,
    slice_rows: int | None,
) -> Fused:
    """Fuse the pairs, (text, negative image), (negative text, image) and the masked texts with their images.

    Args:
        network: the student.
        encoded: the student's encoding of the batch.
        attention_mask: [B, L].
        negatives: from `draw_negatives`.
        slice_rows: pairs that are fused at a time; None for all in one pass.
    """
    tokens = encoded.image_tokens
    negative_image = negatives.image.row
    negative_text = negatives.text.row
    # Texts whose row b attends to image b.
    texts = [encoded.text_states, encoded.text_states[negative_text]]
    masks = [attention_mask, attention_mask[negative_text]]
    if encoded.masked_states is not None:
        texts.append(encoded.masked_states)
        masks.append(attention_mask)
    count = len(texts)

    def outputs(fused: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs, with_negative_text, *masked, with_negative_image = fused
        return torch.stack([pairs[:, 0], with_negative_image[:, 0], with_negative_text[:, 0]], 1), *masked

    def fuse_rows(tokens: Tensor, negative_tokens: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        masks = rows[:count]
        texts = rows[count:]
        fused = network.fuse(torch.cat(texts), torch.cat(masks), tokens).chunk(count)
        return outputs([*fused, network.fuse(texts[0], masks[0], negative_tokens)])

    if slice_rows is None:
        # The fusion encoder takes texts whose row is that of their image, then texts with the index of their image.
        states = torch.cat([*texts, encoded.text_states])
        fused = outputs(
            network.fuse(states, torch.cat([*masks, attention_mask]), tokens, negative_image).chunk(count + 1)
        )
    else:
        fused = in_slices(fuse_rows, slice_rows, tokens, tokens[negative_image], *masks, *texts)
    return Fused(fused[0], None if encoded.masked_states is None else fused[1])


def image_text_matching(head: nn.Module, cls_states: Tensor, negatives: HardNegatives) -> Tensor:
    """Classify fused pairs as match or no match (eq. 4), averaged over the pairs of all processes.

    Args:
        head: [.., D] to two logits.
        cls_states: [B, 3, D], `Fused.cls`.
        negatives: from `draw_negatives`.
    """
    logits = at_least_float32(head(cls_states.transpose(0, 1).flatten(0, 1)))  # [3B, 2]
    labels = torch.arange(len(logits), device=logits.device) < len(cls_states)  # the first B are matches
    image_exists = negatives.image.exists
    weights = torch.cat([torch.ones_like(image_exists), image_exists, negatives.text.exists]).float()
    return itm_loss(logits, labels.long(), weights, mean_count(weights.sum(), logits.dtype))
