"""ALBEF's random draws inside a step: hard negatives and masked words.

They use torch's global generator, which `StepSeedCallback` sets from (seed, step, rank), and never ask the device for
a number. A test puts its own indices in by replacing these functions.

Shapes: B pairs, L text tokens, K rows that the language-model head runs on.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Negatives(NamedTuple):
    """One drawn negative a row.

    Attributes:
        row: long [B], the drawn row; a row without an admissible candidate holds its own index.
        exists: boolean [B], whether the row had an admissible candidate.
    """

    row: Tensor
    exists: Tensor


class MaskedTokens(NamedTuple):
    """A masked text batch.

    Attributes:
        input_ids: long [B, L], ids after masking.
        positions: long [K], positions in the flattened [B * L] text that the head runs on.
        labels: long [K], the original ids at `positions`; -100 for positions that fill up K and carry no loss.
    """

    input_ids: Tensor
    positions: Tensor
    labels: Tensor


def draw_hard_negatives(similarity: Tensor, forbidden: Tensor) -> Negatives:
    """Draw one negative for each row with probability softmax(similarity) over the admissible columns (section 3.2).

    Forbidden pairs get -inf before the softmax. The authors zero them after it, which leaves nothing to draw from once
    a sharp temperature makes the rest underflow.

    Args:
        similarity: [B, B] logits; row = query, column = candidate.
        forbidden: boolean [B, B], true where the candidate matches the query. It must be true on the diagonal.
    """
    exists = ~forbidden.all(-1)
    logits = similarity.detach().float().masked_fill(forbidden, -torch.inf)
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    # A row without candidates "draws" itself, and `exists` takes it out of the loss.
    logits = logits.masked_fill(own & ~exists[:, None], 0.0)
    # Where they are no numbers anything is drawn: the loss will tell, and an error here would end a GPU's process.
    chances = logits.softmax(-1).nan_to_num(nan=1.0)
    return Negatives(torch.multinomial(chances, 1).squeeze(1), exists)


def draw_masked_tokens(
    input_ids: Tensor,
    special: tuple[int, ...],
    mask_token_id: int,
    vocab_size: int,
    probability: float,
) -> MaskedTokens:
    """Mask words as BERT does: of the chosen, 80% become [MASK], 10% a random word, 10% stay (section 3.1).

    Args:
        input_ids: long [B, L].
        special: ids that are never chosen (padding, CLS, SEP).
        mask_token_id: id of [MASK].
        vocab_size: random words are uniform over all ids below it, as with the authors.
        probability: chance of a word to be chosen (0.15 in the paper).
    """
    chosen = torch.rand(input_ids.shape, device=input_ids.device) < probability
    for token in special:
        chosen &= input_ids != token
    kind = torch.rand(input_ids.shape, device=input_ids.device)
    random_words = torch.randint(vocab_size, input_ids.shape, device=input_ids.device)
    masked = torch.where(chosen & (kind < 0.8), mask_token_id, input_ids)
    masked = torch.where(chosen & (kind >= 0.9), random_words, masked)
    return select_positions(input_ids, masked, chosen, _row_capacity(chosen, probability))


def select_positions(input_ids: Tensor, masked: Tensor, chosen: Tensor, rows: int) -> MaskedTokens:
    """List the first `rows` chosen positions, filled up with unchosen ones. Chosen words past them are put back."""
    flat = chosen.flatten()
    positions = torch.argsort(flat, descending=True, stable=True)[:rows]
    kept = torch.zeros_like(flat).index_fill_(0, positions, True) & flat
    labels = torch.where(flat[positions], input_ids.flatten()[positions], -100)
    return MaskedTokens(torch.where(kept.view_as(chosen), masked, input_ids), positions, labels)


def _row_capacity(chosen: Tensor, probability: float) -> int:
    """Rows to run the language-model head on.

    On a CPU the count is at hand. On a device, asking for it would stall the queue of kernels, so a bound is used that
    binomial draws exceed less than once in 10^9 batches; then the words past it are left unmasked.
    """
    if chosen.device.type == "cpu":
        return max(int(chosen.sum()), 1)
    words = chosen.numel()
    mean, deviation = words * probability, math.sqrt(words * probability * (1 - probability))
    return min(words, math.ceil(mean + 6 * deviation) + 1)
