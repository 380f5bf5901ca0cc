"""Cleaning, checking and hashing of captions."""

from __future__ import annotations

import hashlib
import re

_DELETED = str.maketrans("-/", "  ", ",.'!?\"()*#:;~")
ALL_WORDS = 2**31
"""Number of words with which a cleaning keeps all."""
_SPACES = re.compile(r"\s{2,}")


def clean_caption(caption: str, max_words: int = 30) -> str:
    """Apply ALBEF's caption cleaning (`pre_caption` of the authors' code), step by step in their order.

    Args:
        caption: raw text.
        max_words: number of space-separated words kept (authors' value: 30).
    """
    text = caption.lower().translate(_DELETED).replace("<person>", "person")
    text = _SPACES.sub(" ", text).rstrip("\n").strip(" ")
    return " ".join(text.split(" ")[:max_words])


def is_text(text: str) -> bool:
    """Return whether a string can be encoded in UTF-8, which is not so for the lone surrogates that JSON allows."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def usable_caption(caption: object, clean: bool, max_words: int) -> bool:
    """Return whether a caption is a text that is not empty."""
    if not isinstance(caption, str) or not is_text(caption):
        return False
    return bool(clean_caption(caption, max_words) if clean else caption.strip())


def text_id(caption: str) -> int:
    """Return a 63-bit hash of a text, the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(caption.encode(), digest_size=8).digest(), "big") >> 1
