"""The function that reads the tokenizer of a checkpoint's data, which methods do not import from datamodules."""

from collections.abc import Callable, Mapping
from typing import Any

TokenizerOf = Callable[[Mapping[str, Any]], tuple[str | None, str]]
"""Function from a checkpoint to its data's tokenizer as JSON text, and a note on it for the message."""
_READERS: list[TokenizerOf] = []


def register_tokenizer_reader(reader: TokenizerOf) -> TokenizerOf:
    """Let exports read the tokenizer of a checkpoint's data, since methods do not import datamodules."""
    _READERS[:] = [reader]
    return reader


def read_tokenizer(checkpoint: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the tokenizer of a checkpoint's data as JSON text, or None, and a note on it for a message."""
    (reader,) = _READERS
    return reader(checkpoint)
