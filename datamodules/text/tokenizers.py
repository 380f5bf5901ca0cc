"""Captions to token ids: cleaning, tokenizers given or trained, and encoding a batch at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..sources.hub import absence, hub_or_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The tokenizers library starts a thread pool that a forked loader worker cannot use, and warns about it. Workers are
# parallel among themselves, so one thread in each is right; a value that the user has set stays.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# BERT's layout, so that the ids are the same for a trained tokenizer and for a BERT vocabulary.
PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
RESERVED = [PAD, *(f"[unused{i}]" for i in range(1, 100)), UNK, CLS, SEP, MASK]  # ids 0..103

_DELETED = str.maketrans("-/", "  ", ",.'!?\"()*#:;~")
_SPACES = re.compile(r"\s{2,}")


def clean_caption(caption: str, max_words: int = 30) -> str:
    """ALBEF's caption cleaning (``pre_caption`` of the authors' code), step by step in their order.

    Args:
        caption: raw text.
        max_words: number of space-separated words kept (authors' value: 30).
    """
    text = caption.lower().translate(_DELETED).replace("<person>", "person")
    text = _SPACES.sub(" ", text).rstrip("\n").strip(" ")
    return " ".join(text.split(" ")[:max_words])


def is_text(text: str) -> bool:
    """Whether a string holds no lone surrogates, which JSON can spell but no tokenizer, file name or file takes."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_id(caption: str) -> int:
    """A 63-bit number that is equal for equal texts, in every process and every run."""
    return int.from_bytes(hashlib.blake2b(caption.encode(), digest_size=8).digest(), "big") >> 1


def train_wordpiece(captions: Iterable[str], vocab_size: int) -> str:
    """Train a lower-case WordPiece tokenizer, the same in every process for the same captions.

    The special tokens and the unused slots before them stand at BERT's ids: [PAD] 0, [UNK] 100, [CLS] 101, [SEP] 102,
    [MASK] 103.

    Returns:
        The tokenizer as the JSON text of the ``tokenizers`` library.

    Raises:
        ValueError: ``vocab_size`` has no room for more than the reserved ids.
    """
    from tokenizers import models, trainers

    tokenizer = _wordpiece(models.WordPiece({UNK: 0}, unk_token=UNK))
    texts = [tokenizer.normalizer.normalize_str(caption) for caption in captions]
    counts = Counter(letter for text in texts for letter in text if not letter.isspace())
    # At most a quarter of the entries are single letters (and as many their continuations), the rest of the script is
    # [UNK].
    room = (vocab_size - len(RESERVED)) // 4
    kept = sorted(counts, key=lambda letter: (-counts[letter], letter))[: max(room, 0)]
    if not kept:
        raise ValueError(
            f"found vocab_size={vocab_size}, expected at least {len(RESERVED) + 4} to hold the {len(RESERVED)} "
            "reserved ids and some letters: raise vocab_size"
        )
    rare = str.maketrans(dict.fromkeys(counts.keys() - set(kept), " "))
    texts = [text.translate(rare) for text in texts] if rare else texts
    # Without their ids fixed beforehand the continuation letters are numbered in the order of a hash map, ties between
    # equally frequent pairs fall differently in each process, and two ranks end with two vocabularies.
    fixed = RESERVED + ["##" + letter for letter in sorted(kept)]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # Rebuilt, because the reserved slots and letters would otherwise stay "added tokens", matched before the text is
    # split.
    vocabulary = tokenizer.get_vocab()
    return str(_wordpiece(models.WordPiece(vocabulary, unk_token=UNK)).to_str())


def _wordpiece(model: Any) -> Any:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def tokenizer_from_json(text: str) -> PreTrainedTokenizerFast:
    """The tokenizer that :func:`train_wordpiece` gave."""
    from tokenizers import Tokenizer

    return _wrap(Tokenizer.from_str(text))


def _wrap(tokenizer: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, cls_token=CLS, sep_token=SEP, mask_token=MASK
    )


def open_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Open a tokenizer: a hub name, a local folder, a ``vocab.txt`` of BERT's form, or a ``tokenizer.json``.

    Raises:
        ValueError: there is no such tokenizer, or it has no fast form.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not any((path / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        vocabularies = sorted(path.glob("*vocab.txt"))
        if len(vocabularies) == 1:
            path = vocabularies[0]
    if path.is_file():
        return _tokenizer_from_file(path)
    if not path.exists() and (name.startswith((".", "/", "~")) or path.suffix in (".txt", ".json")):
        raise ValueError(
            f"found no tokenizer under {name!r}, expected a folder, a vocab.txt or a hub name: correct the path"
        )
    from transformers import AutoTokenizer

    try:
        # Left open, transformers asks at the terminal whether to run the Python files of a tokenizer.
        with contextlib.nullcontext() if path.is_dir() else hub_or_cache():
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0] if path.is_dir() else absence(error)
        raise ValueError(
            f"found no tokenizer under {name!r} ({reason}), expected a hub name, a local folder or a vocab.txt: "
            "correct the name, or leave it out to train one on the captions"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {name!r} has no fast form, expected one with a tokenizer.json: choose another")
    return tokenizer


def _tokenizer_from_file(path: Path) -> PreTrainedTokenizerFast:
    from tokenizers import models

    if path.suffix == ".json":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    words = path.read_text(encoding="utf-8").splitlines()
    missing = [token for token in (PAD, UNK, CLS, SEP, MASK) if token not in words]
    if missing:
        raise ValueError(
            f"found no {', '.join(missing)} in {str(path)!r}, expected a BERT vocabulary with one entry a line: "
            "give another file, or a tokenizer folder"
        )
    vocabulary = {word: index for index, word in enumerate(words)}
    return _wrap(_wordpiece(models.WordPiece(vocabulary, unk_token=UNK)))


def set_ending(tokenizer: PreTrainedTokenizerFast, append_sep: bool) -> None:
    """Make the tokenizer write ``[CLS] text [SEP]`` or, as the ALBEF authors do, ``[CLS] text``.

    Tokenizers without the two tokens (CLIP's, GPT-2's) keep their own form.

    Raises:
        ValueError: the [SEP] is to be left out by a tokenizer that has none.
    """
    if tokenizer.cls_token is None or tokenizer.sep_token is None:
        if not append_sep:
            raise ValueError(
                f"found append_sep=False with a tokenizer that has cls_token={tokenizer.cls_token!r} and "
                f"sep_token={tokenizer.sep_token!r}, expected both: leave append_sep=True"
            )
        return
    from tokenizers import processors

    ends = [(tokenizer.cls_token, tokenizer.cls_token_id), (tokenizer.sep_token, tokenizer.sep_token_id)]
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    tail = f" {sep}" if append_sep else ""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A{tail}", pair=f"{cls} $A {sep} $B:1{tail and tail + ':1'}", special_tokens=ends
    )


class Encoder(Protocol):
    """Turns captions into token ids."""

    def __call__(self, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, long [B, L]."""

    def usable(self, caption: object) -> bool:
        """Whether anything is left of a caption to encode."""


class TextEncoder:
    """Turns a list of captions into padded token ids.

    Args:
        tokenizer: any fast tokenizer with a padding token.
        max_tokens: longest sequence, special tokens included; longer ones are cut.
        clean: apply :func:`clean_caption` first.
        max_words: for the cleaning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_tokens: int, clean: bool, max_words: int) -> None:
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token is None:
                raise ValueError("found a tokenizer without a padding token, expected one: choose another tokenizer")
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.clean = clean
        self.max_words = max_words

    def __call__(self, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encode captions.

        Returns:
            ``input_ids`` and ``attention_mask``, long [len(captions), longest].
        """
        if not captions:
            empty = torch.zeros(0, 1, dtype=torch.long)
            return {"input_ids": empty, "attention_mask": empty.clone()}
        texts = [clean_caption(caption, self.max_words) for caption in captions] if self.clean else list(captions)
        encoded = self.tokenizer(
            texts,
            padding="longest",
            truncation=True,
            max_length=self.max_tokens,
            return_token_type_ids=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {key: encoded[key] for key in ("input_ids", "attention_mask")}

    def usable(self, caption: object) -> bool:
        """Whether anything is left of a caption to encode."""
        return usable_caption(caption, self.clean, self.max_words)


def usable_caption(caption: object, clean: bool, max_words: int) -> bool:
    """Whether ``caption`` is text of which something is left, after the cleaning if that is on."""
    if not isinstance(caption, str) or not is_text(caption):
        return False
    return bool(clean_caption(caption, max_words) if clean else caption.strip())


def tokenizer_digest(text: str) -> str:
    """A short fingerprint of a tokenizer's JSON text, for messages."""
    return hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()[:12]
