"""CLIP's tokenizer, which is a part of open_clip."""

from __future__ import annotations

import functools

from open_clip import SimpleTokenizer

from .clip import CLIP_TOKENS


class CLIPTokenizer(SimpleTokenizer):
    """open_clip's tokenizer with the attribute names of the ``transformers`` library for its special tokens.

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


@functools.cache
def clip_tokenizer(max_tokens: int = CLIP_TOKENS) -> CLIPTokenizer:
    """Return the tokenizer with a context length; it is cached, since reading the vocabulary takes 0.2 s."""
    return CLIPTokenizer(max_tokens)
