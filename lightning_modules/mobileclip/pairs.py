"""The pairs of a reinforced batch: augmented images with their real and with a synthetic caption."""

from collections.abc import Mapping

from torch import Tensor

from ...common.errors import UserError
from ..losses.pairs import check_length

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
        UserError: If there are none, or their texts are of another length.
    """
    kinds = [kind for kind, name in CAPTIONS.items() if name in batch and wanted in (kind, "both")]
    if not kinds:
        raise UserError(
            f"Expected {CAPTIONS['synthetic']} in the training batch, got only {', '.join(batch)}: train on reinforced "
            "data, or leave model.captions out."
        )
    check_length(batch[CAPTIONS[kinds[0]]], max_tokens)
    return kinds
