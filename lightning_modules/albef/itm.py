"""Image-text matching (ITM) with hard negatives: equation 4 of the paper.

Negatives are drawn by (seed, step, position in the global batch), without waiting for the device. Candidates are the
pairs of one process, or fixed parts of the global batch (`contrast.negative_rows`).

Shapes: B pairs, N image tokens (CLS first), L text tokens (CLS first), D text width.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...callbacks.draws import draw_uniform, global_positions
from ...common.errors import UserError
from ..core.memory import in_slices
from ..core.precision import at_least_float32
from ..evaluation.protocol import Batch
from .counts import mean_count
from .encoding import Encoded
from .itc import Contrast
from .network import ALBEFNetwork
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


def draw_negatives(contrast: Contrast, batch: Batch, settings: ContrastSettings) -> HardNegatives:
    """Draw negatives within the batch of this process, hard ones or evenly.

    Args:
        contrast: similarities of the batch.
        batch: `image_id` [B] and `input_ids` [B, L].
        settings: `negatives`; `negative_rows`; `positives`, of which "image_id" rules out pairs of the same image or of
            the same words, "diagonal" the pair itself alone.

    Raises:
        UserError: If `negative_rows` does not divide the batch.
    """
    forbidden = forbidden_pairs(batch["image_id"], batch["input_ids"], settings.positives)
    if (within := settings.negative_rows) is not None:
        if len(forbidden) % within:
            raise UserError(
                f"Expected a batch of each process that contrast.negative_rows {within} divides, got {len(forbidden)}: "
                "set another number."
            )
        part = torch.arange(len(forbidden), device=forbidden.device) // within
        forbidden = forbidden | (part[:, None] != part)
    to_images, to_texts = contrast.text_logits, contrast.image_logits
    if settings.negatives == "random":
        to_images, to_texts = torch.zeros_like(to_images), torch.zeros_like(to_texts)
    return HardNegatives(image=draw_hard_negatives(to_images, forbidden), text=draw_hard_negatives(to_texts, forbidden))


def forbidden_pairs(image_id: Tensor, input_ids: Tensor, positives: Literal["image_id", "diagonal"]) -> Tensor:
    """Return which pairs of rows are no negatives, boolean [B, B]; `positives` as in `ContrastSettings`."""
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
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    # A row without candidates draws itself, and `exists` removes it from the loss.
    logits = logits.masked_fill(own & ~exists[:, None], 0.0)
    # Sample uniformly where logits are non-finite: the loss reports it, while an error here would kill a GPU process.
    chances = logits.softmax(-1).nan_to_num(nan=1.0)
    # The first of events with these rates: exponentially distributed times, the same on any number of processes.
    size, device = len(chances), chances.device
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
    wrong_image, wrong_text = negatives.image.row, negatives.text.row
    tokens, text, mask = encoded.image_tokens, encoded.text_states, attention_mask
    # Texts of which row b attends to image b.
    aligned = [text, text[wrong_text]]
    masks = [mask, mask[wrong_text]]
    if encoded.masked_states is not None:
        aligned.append(encoded.masked_states)

    def outputs(aligned: Sequence[Tensor], with_wrong_image: Tensor) -> tuple[Tensor, ...]:
        pairs, with_wrong_text = aligned[:2]
        return torch.stack([pairs[:, 0], with_wrong_image[:, 0], with_wrong_text[:, 0]], 1), *aligned[2:]

    def fuse_rows(
        mask: Tensor, wrong_mask: Tensor, tokens: Tensor, wrong_tokens: Tensor, *aligned: Tensor
    ) -> tuple[Tensor, ...]:
        masks = torch.cat([mask, wrong_mask, *(mask for _ in aligned[2:])])
        fused = network.fuse(torch.cat(aligned), masks, tokens).chunk(len(aligned))
        return outputs(fused, network.fuse(aligned[0], mask, wrong_tokens))

    if slice_rows is None:
        # The fusion encoder takes aligned texts first, then texts with the index of their image.
        masks += [mask] * (len(aligned) - 1)
        chunks = network.fuse(torch.cat([*aligned, text]), torch.cat(masks), tokens, wrong_image).chunk(len(masks))
        found = outputs(chunks[:-1], chunks[-1])
    else:
        found = in_slices(fuse_rows, slice_rows, *masks, tokens, tokens[wrong_image], *aligned)
    return Fused(found[0], None if encoded.masked_states is None else found[1])


def image_text_matching(head: nn.Module, cls_states: Tensor, negatives: HardNegatives) -> Tensor:
    """Classify fused pairs as match or no match (eq. 4), averaged over the pairs of all processes.

    Args:
        head: [.., D] to two logits.
        cls_states: [B, 3, D], `Fused.cls`.
        negatives: from `draw_negatives`.
    """
    logits = at_least_float32(head(cls_states.transpose(0, 1).flatten(0, 1)))  # [3B, 2]
    labels = torch.arange(len(logits), device=logits.device) < len(cls_states)  # the first B are matches
    image, text = negatives.image.exists, negatives.text.exists
    weights = torch.cat([torch.ones_like(image), image, text]).float()
    return itm_loss(logits, labels.long(), weights, mean_count(weights.sum(), logits.dtype))


def itm_loss(logits: Tensor, labels: Tensor, weights: Tensor, count: Tensor) -> Tensor:
    """Compute the image-text matching loss (eq. 4).

    Args:
        logits: [R, 2]; class 1 is a match.
        labels: long [R].
        weights: [R], 0 for a pair without an admissible negative, else 1.
        count: 0-D, denominator of the sum.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weights).sum() / count
