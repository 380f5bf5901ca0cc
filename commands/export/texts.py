"""Encoding of texts as the training of a model encoded them."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ...common.clip_vocabulary import CLIP_VOCABULARY
from ...datamodules.pairs.datamodule import PairDataModule
from ...datamodules.text.clip import CLIP, CLIP_TOKENS, CLIPTextEncoder
from ...datamodules.text.tokenizers import Encoder, TextEncoder, set_ending


def text_encoder(module: Any, tokenizer: Any, data: Mapping[str, Any]) -> Encoder:
    """Return the encoder of texts as the datamodule of the training would build it.

    Args:
        module: the trained module.
        tokenizer: tokenizer of transformers; None for CLIP's.
        data: options of the datamodule.
    """
    defaults = {name: option.default for name, option in inspect.signature(PairDataModule).parameters.items()}
    options = {name: data.get(name, defaults[name]) for name in ("clean_captions", "max_words", "append_sep")}
    longest = data.get("max_tokens") or module.data_sizes().max_tokens or getattr(module, "max_tokens", None)
    clean, words = options["clean_captions"], options["max_words"]
    if tokenizer is None:
        return CLIPTextEncoder(longest or CLIP_TOKENS, clean, words)
    set_ending(tokenizer, options["append_sep"])
    return TextEncoder(tokenizer, longest or defaults["max_tokens"], clean, words)


def has_clip_texts(module: Any) -> bool:
    """Return whether a module's texts have CLIP's vocabulary, whose tokenizer is part of open_clip."""
    vocabulary = module.data_sizes().vocab_size or getattr(getattr(module, "student", None), "vocab_size", None)
    return vocabulary in (None, CLIP_VOCABULARY)


def tokenizer_of_folder(folder: Path, config: Mapping[str, Any]) -> Any | None:
    """Return the tokenizer of an exported folder; None for CLIP's, whose padding differs from that of transformers.

    Args:
        folder: the folder.
        config: its configuration.
    """
    of_clip = (config.get("data") or {}).get("tokenizer") == CLIP
    if of_clip or not (folder / "tokenizer.json").is_file():
        return None
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
