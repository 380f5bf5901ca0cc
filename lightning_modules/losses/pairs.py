"""Features of a batch of pairs, with those of all processes.

Shapes: b pairs of this process, E embedding dimension, L tokens.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...callbacks import gather
from ...common.clip_vocabulary import CLIP_VOCABULARY
from ...common.errors import UserError
from ..core.memory import in_slices, kept_statistics, one_update
from ..core.precision import unit
from .contrast import Side


def check_length(input_ids: Tensor, max_tokens: int) -> None:
    """Check the number of tokens of a text, which the text towers cannot vary.

    Raises:
        UserError: If it differs.
    """
    if input_ids.shape[1] != max_tokens:
        raise UserError(
            f"Expected captions of {max_tokens} tokens, got {input_ids.shape[1]}: give the data tokenizer clip, "
            f"vocab_size {CLIP_VOCABULARY} and max_tokens {max_tokens}."
        )


def student_sides(
    student: Any, image: Tensor, texts: Mapping[str, Tensor], micro_batch_size: int | None
) -> dict[str, Side]:
    """Return the student's unit features of pairs, by kind of caption, with gradients also across processes.

    Args:
        student: an open_clip model with a `logit_scale`.
        image: images [b, 3, S, S].
        texts: token ids [b, L] by kind of caption.
        micro_batch_size: pairs that go through the towers at a time; None means all.
    """

    def encode(image: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
        # All captions share one pass through the text tower.
        features = student.encode_text(torch.cat(texts)).chunk(len(texts))
        return tuple(unit(part) for part in (student.encode_image(image), *features))

    one_step: AbstractContextManager[None] = nullcontext() if micro_batch_size is None else one_update(student)
    with one_step:
        own = in_slices(encode, micro_batch_size, image, *texts.values(), again=lambda: kept_statistics(student))
    own_image, *own_texts = own
    all_image, *all_texts = gather(torch.cat(own, 1), True).chunk(len(own), 1)
    scale = student.logit_scale.exp()
    return {
        kind: Side(own_image, text, all_image, all_text, scale)
        for kind, text, all_text in zip(texts, own_texts, all_texts, strict=True)
    }
