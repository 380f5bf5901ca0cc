"""Masked language modeling (MLM) with momentum distillation: equations 3 and 7 of the paper.

Masked words are drawn by (seed, step, position in the global batch), without waiting for the device.

Shapes: B pairs, L text tokens, D text width, K rows that the language-model head runs on, W words of the vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...callbacks.draws import draw_bits, draw_uniform
from ...common.errors import UserError
from ..core.counting import may_read_values
from ..core.memory import in_slices
from .losses import mean_count, mlm_loss
from .network import ALBEFNetwork, Encoded
from .settings import TextSettings


def check_special_tokens(datamodule: Any | None, text: TextSettings) -> None:
    """Compare the special token ids of the model with those of the data's tokenizer, if the datamodule has them.

    Raises:
        UserError: If the ids differ.
    """
    ids = getattr(datamodule, "special_token_ids", None)
    if ids is not None and dict(ids) != {name: text.special_token_ids[name] for name in ids}:
        raise UserError(
            f"Expected the tokenizer's special ids {dict(ids)}, got {text.special_token_ids}: set "
            "model.text.pad_token_id and the others to the tokenizer's."
        )


class MaskedTokens(NamedTuple):
    """A batch of masked texts."""

    input_ids: Tensor  # long [B, L] after masking
    positions: Tensor  # long [K], positions in the flattened texts [B * L] that the head runs on
    labels: Tensor  # long [K], original ids at `positions`; -100 for positions that fill up K and carry no loss


def draw_masked_tokens(input_ids: Tensor, text: TextSettings) -> MaskedTokens:
    """Mask words as BERT: 80% of the chosen become [MASK], 10% a random word, 10% are unchanged (section 3.2).

    Args:
        input_ids: long [B, L].
        text: share of masked words, special tokens, which are never chosen, and the vocabulary, from all of which
            random words are drawn, as in the authors' code.
    """
    size = (*input_ids.shape, input_ids.device)
    chosen = draw_uniform(*size) < text.mask_probability
    for token in (text.pad_token_id, text.cls_token_id, text.sep_token_id):
        chosen &= input_ids != token
    replacement = draw_uniform(*size)
    random_words = draw_bits(*size) % text.vocab_size
    masked = torch.where(chosen & (replacement < 0.8), text.mask_token_id, input_ids)
    masked = torch.where(chosen & (replacement >= 0.9), random_words, masked)
    return select_positions(input_ids, masked, chosen, _row_capacity(chosen, text.mask_probability))


def select_positions(input_ids: Tensor, masked: Tensor, chosen: Tensor, rows: int) -> MaskedTokens:
    """List the first `rows` chosen positions, filled up with unchosen ones; chosen words beyond them are restored."""
    flat = chosen.flatten()
    positions = torch.argsort(flat, descending=True, stable=True)[:rows]
    kept = torch.zeros_like(flat).index_fill_(0, positions, True) & flat
    labels = torch.where(flat[positions], input_ids.flatten()[positions], -100)
    return MaskedTokens(torch.where(kept.view_as(chosen), masked, input_ids), positions, labels)


def _row_capacity(chosen: Tensor, probability: float) -> int:
    """Return the number of rows for the language-model head.

    On a CPU this is the number of chosen words. On other devices the host would wait for it: it is a bound that
    binomial draws exceed less than once in 10^9 batches; words beyond it are left unmasked.
    """
    if may_read_values(chosen.device):
        return max(int(chosen.sum()), 1)
    words = chosen.numel()
    mean = words * probability
    deviation = math.sqrt(words * probability * (1 - probability))
    return min(words, math.ceil(mean + 6 * deviation) + 1)


def masked_language_modeling(
    student: ALBEFNetwork,
    teacher: ALBEFNetwork,
    fused: Tensor,
    encoded: Encoded,
    attention_mask: Tensor,
    masked: MaskedTokens,
    alpha: float | Tensor,
    slice_rows: int | None,
) -> Tensor:
    """Predict masked words and the teacher's soft labels, averaged over the words of all processes.

    Args:
        student: predicts the words of `fused`.
        teacher: fuses `encoded`, and predicts the soft labels.
        fused: [B, L, D], the student's states of the masked texts after fusion.
        encoded: the teacher's encoding of the batch before fusion; without masked texts there are no soft labels.
        attention_mask: [B, L].
        masked: from `draw_masked_tokens`.
        alpha: weight of the soft labels.
        slice_rows: pairs that are fused, and whose share of the words is predicted, at a time; None for all at once.
    """
    states = [fused]
    if encoded.masked_states is not None:

        def fuse_rows(states: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor]:
            return (teacher.fuse(states, mask, tokens),)

        with torch.no_grad():
            states += in_slices(fuse_rows, slice_rows, encoded.masked_states, attention_mask, encoded.image_tokens)
    count = mean_count((masked.labels != -100).sum(), torch.promote_types(fused.dtype, torch.float32))

    def predict_rows(labels: Tensor, student_states: Tensor, *teacher_states: Tensor) -> tuple[Tensor]:
        with torch.no_grad():
            teacher_logits = teacher.predict_words(teacher_states[0]) if teacher_states else None
        logits = student.predict_words(student_states)
        return (mlm_loss(logits, teacher_logits, labels, alpha, count)[None],)

    # All processes have the same number of slices for any number of masked words, because sharded networks communicate.
    sizes = slice_rows and [len(rows) for rows in masked.labels.tensor_split(math.ceil(len(fused) / slice_rows))]
    masked_states = (each.flatten(0, 1)[masked.positions] for each in states)
    return in_slices(predict_rows, sizes, masked.labels, *masked_states)[0].sum()
