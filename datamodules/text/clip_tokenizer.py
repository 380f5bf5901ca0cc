"""CLIP's tokenizer, which is a part of open_clip. A file of its own, since other data does not need open_clip."""

from __future__ import annotations

import functools
from typing import Any

from open_clip import SimpleTokenizer

from ...common.clip_vocabulary import CLIP_TOKENS, clip_tokenizer_json


class CLIPTokenizer(SimpleTokenizer):
    """open_clip's tokenizer with the attribute names of the `transformers` library for its special tokens."""

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
