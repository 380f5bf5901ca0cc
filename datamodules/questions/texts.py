"""Cleaning and encoding of questions, and encoding of answers, as the ALBEF authors do for VQA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..text.captions import is_text
from ..text.tokenizers import TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DELETED = str.maketrans("-/", "  ", ",.'!?\"()*#:;~")


def clean_question(question: str, max_words: int = 30) -> str:
    """Apply ALBEF's question cleaning (`pre_question` of the authors' code), which keeps runs of spaces.

    Args:
        question: raw text.
        max_words: number of space-separated words kept (authors: 30 in training, 50 at test); of a run of spaces, each
            but the first counts.
    """
    text = question.lower().translate(_DELETED).rstrip(" ")
    return " ".join(text.split(" ")[:max_words])


class QuestionEncoder(TextEncoder):
    """Encode questions as padded token ids.

    Args:
        tokenizer: any fast tokenizer with a padding token.
        max_tokens: longest sequence, special tokens included; longer sequences are truncated.
        clean: whether to apply `clean_question` first.
        max_words: number of words that the cleaning keeps.
    """

    def cleaned(self, caption: str, max_words: int) -> str:
        """Return a question after the cleaning, which keeps `max_words` words; the question if cleaning is off."""
        return clean_question(caption, max_words) if self.clean else caption

    def usable(self, caption: object) -> bool:
        """Return whether a question is a text that is not empty after the cleaning, if cleaning is on."""
        if not isinstance(caption, str) or not is_text(caption):
            return False
        return bool(self.cleaned(caption, self.max_words).strip())


def usable_answers(answers: Sequence[object]) -> list[str]:
    """Return the answers that are texts and not empty."""
    return [text for text in answers if isinstance(text, str) and text.strip() and is_text(text)]


def encode_answers(tokenizer: PreTrainedTokenizerFast, answers: Sequence[str]) -> dict[str, torch.Tensor]:
    """Encode answers as [CLS] text [SEP], padded and never truncated.

    Returns:
        `answer_ids` and `answer_mask`, long [len(answers), longest].
    """
    start, end, pad = (getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad"))
    texts = tokenizer(list(answers), add_special_tokens=False)["input_ids"] if answers else []
    longest = max((len(ids) for ids in texts), default=0) + 2
    ids = torch.full((len(texts), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text) + 2] = torch.tensor([start, *text, end])
        mask[row, : len(text) + 2] = 1
    return {"answer_ids": ids, "answer_mask": mask}
