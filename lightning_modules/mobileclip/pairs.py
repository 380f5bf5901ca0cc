"""The pairs of a reinforced batch: augmented images with their real and with a synthetic caption.

Shapes: b pairs of this process, E embedding dimension, L tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...callbacks import gather
from ...common.errors import UserError
from ..contrast import Side
from ..memory import in_slices
from ..networks.batch_norm import kept_statistics, one_update
from ..networks.precision import unit

CAPTIONS = {"real": "input_ids", "synthetic": "synthetic_input_ids"}
"""Token ids in a batch, by kind of caption."""
TEACHER_TEXTS = {"real": "teacher_text", "synthetic": "teacher_synthetic"}
"""The teachers' text embeddings in a batch, by kind of caption."""


def caption_kinds(batch: Mapping[str, Tensor], wanted: str, max_tokens: int) -> list[str]:
    """Return the kinds of captions in a batch that training uses.

    Args:
        batch: a training batch.
        wanted: "real", "synthetic" or "both".
        max_tokens: number of tokens of a text.

    Raises:
        UserError: if there are none, or their texts are of another length.
    """
    kinds = [kind for kind, name in CAPTIONS.items() if name in batch and wanted in (kind, "both")]
    if not kinds:
        raise UserError(
            f"Expected {CAPTIONS['synthetic']} in the training batch, got only {', '.join(batch)}: train on reinforced "
            "data, or leave model.captions out."
        )
    check_length(batch[CAPTIONS[kinds[0]]], max_tokens)
    return kinds


def check_length(input_ids: Tensor, max_tokens: int) -> None:
    """Check the number of tokens of a text, which the text towers cannot vary.

    Raises:
        UserError: if it differs.
    """
    if input_ids.shape[1] != max_tokens:
        raise UserError(
            f"Expected captions of {max_tokens} tokens, got {input_ids.shape[1]}: give the data tokenizer clip, "
            f"vocab_size 49408 and max_tokens {max_tokens}."
        )


def student_sides(
    student: Any, batch: Mapping[str, Tensor], kinds: Sequence[str], micro_batch_size: int | None
) -> dict[str, Side]:
    """Return the student's unit features of the pairs of each kind of caption, with gradients also across processes.

    Args:
        student: an open_clip model with a `logit_scale`.
        batch: images [b, 3, S, S] and token ids [b, L].
        kinds: as of `caption_kinds`.
        micro_batch_size: pairs that go through the towers at a time; None means all.
    """

    def encode(image: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
        # All captions share one pass through the text tower.
        features = student.encode_text(torch.cat(texts)).chunk(len(texts))
        return tuple(unit(part) for part in (student.encode_image(image), *features))

    inputs = [batch["image"], *(batch[CAPTIONS[kind]] for kind in kinds)]
    one_step: AbstractContextManager[None] = nullcontext() if micro_batch_size is None else one_update(student)
    with one_step:
        own = in_slices(encode, micro_batch_size, *inputs, again=lambda: kept_statistics(student))
    image, *texts = own
    all_image, *all_texts = gather(torch.cat(own, 1), True).chunk(len(own), 1)
    scale = student.logit_scale.exp()
    return {
        kind: Side(image, text, all_image, all_text, scale)
        for kind, text, all_text in zip(kinds, texts, all_texts, strict=True)
    }
