"""Training of tokenizers, and encoding of batches of captions."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

from ...common.errors import UserError
from ...common.tokenizers import RESERVED, UNK, wordpiece
from .captions import ALL_WORDS, clean_caption, usable_caption

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_CAPTIONS_AT_ONCE = 1000
"""Captions that a tokenizer's training normalizes together."""


def train_wordpiece(captions: Iterable[str], vocab_size: int) -> str:
    """Train a lowercase WordPiece tokenizer; the result is the same in every process for the same captions.

    The special tokens have BERT's ids, with the unused ids between them: [PAD] 0, [UNK] 100, [CLS] 101, [SEP] 102,
    [MASK] 103.

    Returns:
        The tokenizer as JSON text of the `tokenizers` library.

    Raises:
        UserError: If `vocab_size` leaves no room for characters beside the reserved ids.
    """
    from tokenizers import models, trainers

    tokenizer = wordpiece(models.WordPiece({UNK: 0}, unk_token=UNK))
    texts = [tokenizer.normalizer.normalize_str("\n".join(piece)) for piece in _pieces(captions)]
    counts = {character: count for character, count in _character_counts(texts).items() if not character.isspace()}
    # At most a quarter of the entries are single characters, and a quarter are their continuations; rarer characters
    # are [UNK].
    room = (vocab_size - len(RESERVED)) // 4
    characters = sorted(counts, key=lambda character: (-counts[character], character))[: max(room, 0)]
    if not characters:
        raise UserError(
            f"Expected vocab_size of at least {len(RESERVED) + 4} for the {len(RESERVED)} reserved ids and some "
            f"characters, got {vocab_size}: increase data.vocab_size."
        )
    rare = str.maketrans(dict.fromkeys(counts.keys() - set(characters), " "))
    texts = [text.translate(rare) for text in texts] if rare else texts
    # Without fixed ids the library numbers the continuation characters in the order of a hash map. Ties between equally
    # frequent pairs would then be broken differently in each process, and ranks would train different vocabularies.
    fixed = RESERVED + ["##" + character for character in sorted(characters)]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # Rebuilt, since reserved ids and characters would otherwise be "added tokens", which are matched before the split
    # into words.
    vocabulary = tokenizer.get_vocab()
    return str(wordpiece(models.WordPiece(vocabulary, unk_token=UNK)).to_str())


def _pieces(captions: Iterable[str]) -> Iterator[list[str]]:
    """Yield captions in lists: the words of a line are the same in a text of many lines, which is read at once."""
    remaining = iter(captions)
    while piece := list(itertools.islice(remaining, _CAPTIONS_AT_ONCE)):
        yield piece


def _character_counts(texts: Iterable[str]) -> dict[str, int]:
    """Return how often each character occurs in texts."""
    counts = np.zeros(sys.maxunicode + 1, np.int64)
    for text in texts:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        present = np.bincount(codes)
        counts[: len(present)] += present
    return {chr(code): int(counts[code]) for code in np.flatnonzero(counts).tolist()}


class Encoder(ABC):
    """Encoder of captions as token ids.

    Args:
        max_tokens: longest sequence, special tokens included; longer sequences are truncated.
        clean: whether to apply `clean_caption` first.
        max_words: number of words that the cleaning keeps.
    """

    def __init__(self, max_tokens: int, clean: bool, max_words: int) -> None:
        self.max_tokens = max_tokens
        self.clean = clean
        self.max_words = max_words

    @abstractmethod
    def __call__(self, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `attention_mask`, long [B, L]; padding follows the sequences."""

    @abstractmethod
    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Return the number of tokens of each caption before any truncation, special tokens included."""

    def cleaned(self, caption: str, max_words: int) -> str:
        """Return a caption after the cleaning, which keeps `max_words` words; the caption if cleaning is off."""
        return clean_caption(caption, max_words) if self.clean else caption

    def usable(self, caption: object) -> bool:
        """Return whether a caption is not empty after the cleaning, if cleaning is on."""
        return usable_caption(caption, self.clean, self.max_words)


class TextEncoder(Encoder):
    """Encode a list of captions as padded token ids.

    Args:
        tokenizer: any fast tokenizer with a padding token.
        max_tokens: as in `Encoder`, like `clean` and `max_words`.
        pad_to_multiple_of: batches are padded to a length that this divides, or to `max_tokens`; by default to their
            longest sequence.
        prefix: text before each caption.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        max_tokens: int,
        clean: bool,
        max_words: int,
        pad_to_multiple_of: int = 1,
        prefix: str = "",
    ) -> None:
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token is None:
                raise UserError(
                    "Expected a tokenizer with a padding or an end-of-text token, got one without both: choose another."
                )
            tokenizer.pad_token = tokenizer.eos_token
        super().__init__(max_tokens, clean, max_words)
        self.tokenizer = tokenizer
        self.pad_to_multiple_of = pad_to_multiple_of
        self.prefix = prefix

    def __call__(self, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encode captions, padded to the longest."""
        if not captions:
            empty = torch.zeros(0, 1, dtype=torch.long)
            return {"input_ids": empty, "attention_mask": empty.clone()}
        encoded = self.tokenizer(
            [self.prefix + self.cleaned(caption, self.max_words) for caption in captions],
            padding="longest",
            truncation=True,
            max_length=self.max_tokens,
            return_token_type_ids=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        length = encoded["input_ids"].shape[1]
        wanted = min(-(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of, self.max_tokens)
        values = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0}
        return {key: pad(encoded[key], (0, wanted - length), value=value) for key, value in values.items()}

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Return the number of tokens of each caption, as the base class does."""
        if not captions:
            return []
        texts = [self.prefix + self.cleaned(caption, ALL_WORDS) for caption in captions]
        return [len(ids) for ids in self.tokenizer(texts, verbose=False)["input_ids"]]


def tokenizer_digest(text: str) -> str:
    """Return a short fingerprint of a tokenizer's JSON text, for messages."""
    return hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()[:12]
