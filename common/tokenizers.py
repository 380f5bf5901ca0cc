"""Tokenizers of the `tokenizers` and `transformers` libraries: opened by name, and read from a run's checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .clip_vocabulary import CLIP, clip_tokenizer_json
from .errors import UserError
from .hub import hub_or_cache, reason_not_found

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The tokenizers library starts a thread pool that forked loader workers cannot use, and warns about it. One thread per
# worker suffices; a value set by the user is kept.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# BERT's layout, so that a trained tokenizer and a BERT vocabulary have the same special token ids.
PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
RESERVED = [PAD, *(f"[unused{i}]" for i in range(1, 100)), UNK, CLS, SEP, MASK]  # ids 0..103


_NAMES = {
    "pad": (PAD, "<pad>", "<|endoftext|>"),
    "unk": (UNK, "<unk>", "<|endoftext|>"),
    "cls": (CLS, "<s>"),
    "sep": (SEP, "</s>"),
    "mask": (MASK, "<mask>"),
    "eos": ("</s>", "<|endoftext|>"),
}
"""Names of special tokens by role, in order of preference."""
_FILES = ("tokenizer*.json", "vocab*", "merges.txt", "*.model")
"""Files of a tokenizer; for a folder without any, transformers builds one of special tokens only."""


def wordpiece(model: Any) -> Any:
    """Return a lowercase tokenizer of the `tokenizers` library for a WordPiece model; it splits words as BERT does."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def tokenizer_from_json(text: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer from the result of `train_wordpiece` or `to_json`."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(text)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens(tokenizer))


def to_json(backend: Any) -> str:
    """Return a tokenizer of the `tokenizers` library as JSON text, without the length of an earlier batch."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(backend.to_str())
    plain.no_truncation()
    plain.no_padding()
    return str(plain.to_str())


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the special tokens of a tokenizer of the `tokenizers` library, whose JSON text does not name their roles.

    They are found by the names that BERT, RoBERTa (also XLM-R and NLLB), T5, GPT-2 and CLIP give them.
    """
    return {
        f"{role}_token": token
        for role, names in _NAMES.items()
        for token in [next((name for name in names if tokenizer.token_to_id(name) is not None), None)]
        if token is not None
    }


def _wrap(tokenizer: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, cls_token=CLS, sep_token=SEP, mask_token=MASK
    )


def open_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Open a tokenizer.

    Args:
        name: hub name, local folder, `vocab.txt` in BERT's form, or `tokenizer.json`.

    Raises:
        UserError: If the tokenizer does not exist, or has no fast implementation.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not any((path / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        vocabularies = sorted(path.glob("*vocab.txt"))
        if len(vocabularies) == 1:
            path = vocabularies[0]
    if path.is_file():
        return _tokenizer_from_file(path)
    if not path.exists() and (name.startswith((".", "/", "~")) or path.suffix in (".txt", ".json")):
        raise UserError(f"Expected a tokenizer folder, a vocab.txt or a hub name, got {name!r}: correct the path.")
    if path.is_dir() and not any(list(path.glob(pattern)) for pattern in _FILES):
        raise UserError(
            f"Expected a tokenizer in the folder {name!r}, found none: download tokenizer.json, or name another folder "
            "or a hub name."
        )
    from transformers import AutoTokenizer

    try:
        # Without trust_remote_code=False, transformers asks in the terminal whether to run the Python files of a
        # tokenizer.
        with contextlib.nullcontext() if path.is_dir() else hub_or_cache():
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=False)
    except Exception as error:
        reason = (
            (str(error).strip() or type(error).__name__).splitlines()[0] if path.is_dir() else reason_not_found(error)
        )
        raise UserError(
            f"Expected a hub name, a local folder or a vocab.txt of a tokenizer, got {name!r} ({reason}): correct the "
            "name, or leave it out to train a tokenizer on the captions."
        ) from error
    if not tokenizer.is_fast:
        raise UserError(f"Expected a tokenizer with a fast implementation, got {name!r}: choose another tokenizer.")
    return tokenizer


def _tokenizer_from_file(path: Path) -> PreTrainedTokenizerFast:
    from tokenizers import models

    if path.suffix == ".json":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    words = path.read_text(encoding="utf-8").splitlines()
    missing = [token for token in (PAD, UNK, CLS, SEP, MASK) if token not in words]
    if missing:
        raise UserError(
            f"Expected a BERT vocabulary with one entry per line, got {str(path)!r} without {', '.join(missing)}: give "
            "another file, or a tokenizer folder."
        )
    vocabulary = {word: index for index, word in enumerate(words)}
    return _wrap(wordpiece(models.WordPiece(vocabulary, unk_token=UNK)))


def set_ending(tokenizer: PreTrainedTokenizerFast, append_sep: bool) -> None:
    """Set the tokenizer's template to `[CLS] text [SEP]` or, as the ALBEF authors do, `[CLS] text`.

    Tokenizers without the two tokens (CLIP's, GPT-2's) keep their own template, and so do those that begin with another
    token (NLLB's with the language), if it is complete.

    Raises:
        UserError: If `append_sep` is False for a tokenizer without [CLS] or [SEP].
    """
    if tokenizer.cls_token is None or tokenizer.sep_token is None:
        if not append_sep:
            raise UserError(
                f"Expected a tokenizer with [CLS] and [SEP] for append_sep=False, got "
                f"cls_token={tokenizer.cls_token!r} and sep_token={tokenizer.sep_token!r}: leave data.append_sep true."
            )
        return
    from tokenizers import processors

    begin = tokenizer.backend_tokenizer.encode("").ids[:1]
    if append_sep and begin and begin != [tokenizer.cls_token_id]:
        return
    ends = [(tokenizer.cls_token, tokenizer.cls_token_id), (tokenizer.sep_token, tokenizer.sep_token_id)]
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    tail = f" {sep}" if append_sep else ""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A{tail}", pair=f"{cls} $A {sep} $B:1{tail and tail + ':1'}", special_tokens=ends
    )


def with_prefix(text: str, prefix: str) -> str:
    """Return a tokenizer that puts a prefix before each text, which is not empty, as JSON text.

    Args:
        text: the tokenizer as JSON text of the `tokenizers` library.
        prefix: the prefix; an empty one changes nothing.
    """
    from tokenizers import Tokenizer, normalizers

    if not prefix:
        return text
    tokenizer = Tokenizer.from_str(text)
    first = normalizers.Prepend(prefix)
    normalizer = tokenizer.normalizer
    tokenizer.normalizer = first if normalizer is None else normalizers.Sequence([first, normalizer])
    return str(tokenizer.to_str())


def decoded_text(tokenizer: Any, ids: torch.Tensor) -> str:
    """Return a text as a model read it, unknown words included.

    Args:
        tokenizer: A tokenizer of `transformers`, or an object with `decode`.
        ids: Token ids [L] without padding.
    """
    ends = {getattr(tokenizer, f"{name}_token_id", None) for name in ("cls", "sep", "pad", "bos", "eos")}
    return str(tokenizer.decode([number for number in ids.tolist() if number not in ends]))


def trained_tokenizer(content: Mapping[str, Any]) -> str | None:
    """Return the tokenizer that a run trained, from the datamodule's state in the checkpoint.

    Returns:
        The tokenizer as JSON text; None if the run trained no tokenizer.
    """
    # Lightning stores the state of the datamodule under the name of its class, which may be any name.
    states = [state for name, state in content.items() if not name.endswith("hyper_parameters")]
    texts = [state.get("tokenizer") for state in states if isinstance(state, Mapping)]
    return next((text for text in texts if isinstance(text, str)), None)


def tokenizer_in_checkpoint(path: str | os.PathLike[str] | None) -> str | None:
    """Return the tokenizer that the run of a checkpoint trained, as JSON text; None if it trained none.

    Lightning restores the state of a datamodule only if its class is the same, but a model needs the token ids that it
    was trained with, also with another datamodule.
    """
    file = Path(path or "")
    if file.is_dir():
        file = file / "meta.pt"  # of a sharded checkpoint
    if not file.is_file():
        return None
    return trained_tokenizer(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def saved_tokenizer(content: Mapping[str, Any], expected: str | None = None) -> tuple[str | None, str]:
    """Return the tokenizer of the datamodule in a checkpoint, for an export.

    Args:
        content: the checkpoint.
        expected: folder or hub name of the tokenizer of the text tower, for a checkpoint that names none.

    Returns:
        The tokenizer as JSON text, with the template that ends texts; None if there is no readable tokenizer. And a
        phrase about the tokenizer for the message of the export.
    """
    data = content.get("datamodule_hyper_parameters") or {}
    trained = trained_tokenizer(content)
    try:
        if trained is not None:
            tokenizer = tokenizer_from_json(trained)
        elif data.get("tokenizer") == CLIP:
            return clip_tokenizer_json(), "with its tokenizer"
        elif (name := data.get("tokenizer") or expected) is not None:
            tokenizer = open_tokenizer(name)
        else:
            return None, "without a tokenizer, since the checkpoint names none"
    except (UserError, ValueError) as error:
        return None, f"without its tokenizer ({error})"
    set_ending(tokenizer, data.get("append_sep", True))
    return tokenizer.backend_tokenizer.to_str(), "with its tokenizer"
