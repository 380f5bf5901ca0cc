"""CLIP's tokenizer, which open_clip contains, and the encoding of captions by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.clip_vocabulary import CLIP_TOKENS
from .captions import ALL_WORDS
from .tokenizers import Encoder


class CLIPTextEncoder(Encoder):
    """Encode captions as CLIP's token ids, padded to the model's context length.

    MobileCLIP's text towers attend to all positions, padding included, so the embedding depends on the length.

    Args:
        max_tokens: the context length, start and end tokens included; longer captions are truncated before the end
            token.
        clean: whether to apply ALBEF's caption cleaning first; CLIP's own cleaning is always applied.
        max_words: number of words that ALBEF's cleaning keeps.
    """

    def __init__(self, max_tokens: int = CLIP_TOKENS, clean: bool = False, max_words: int = 30) -> None:
        super().__init__(max_tokens, clean, max_words)
        from .clip_tokenizer import clip_tokenizer  # needs open_clip, as other tokenizers do not

        self.tokenizer = clip_tokenizer(max_tokens)

    def __call__(self, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encode a batch.

        Returns:
            `input_ids` and `attention_mask`, long [B, L], L being `max_tokens`.
        """
        if not captions:
            empty = torch.zeros(0, self.max_tokens, dtype=torch.long)
            return {"input_ids": empty, "attention_mask": empty.clone()}
        ids = self.tokenizer([self.cleaned(caption, self.max_words) for caption in captions])
        end = ids.argmax(1, keepdim=True)  # the end token has the highest id
        return {"input_ids": ids, "attention_mask": (torch.arange(self.max_tokens) <= end).long()}

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Return the number of tokens of each caption, as the base class does."""
        return [len(self.tokenizer.encode(self.cleaned(caption, ALL_WORDS))) + 2 for caption in captions]
