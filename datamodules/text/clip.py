"""CLIP's tokenizer, which open_clip contains, and the encoding of captions by it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from open_clip import SimpleTokenizer

from ...common.clip_vocabulary import clip_tokenizer_json
from .captions import ALL_WORDS
from .tokenizers import Encoder

CLIP_TOKENS = 77


class CLIPTokenizer(SimpleTokenizer):
    """open_clip's tokenizer with the attribute names of the `transformers` library for its special tokens.

    Args:
        max_tokens: the context length.
    """

    mask_token_id = None
    pad_token_id = 0  # also the id of "!"

    def __init__(self, max_tokens: int = CLIP_TOKENS) -> None:
        super().__init__(context_length=max_tokens)
        self.cls_token_id = self.sot_token_id
        self.sep_token_id = self.eot_token_id

    def __len__(self) -> int:
        return int(self.vocab_size)

    @functools.cached_property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the `tokenizers` library with this vocabulary."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(clip_tokenizer_json())


@functools.cache
def clip_tokenizer(max_tokens: int = CLIP_TOKENS) -> CLIPTokenizer:
    """Return the tokenizer with a context length; it is cached, since reading the vocabulary takes 0.2 s."""
    return CLIPTokenizer(max_tokens)


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
