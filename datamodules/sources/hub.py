"""The Hugging Face hub, of which nobody waits for an answer: its libraries ask a hub that is away for 20 s and more."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

TIMEOUT = 10.0
"""Seconds that the hub has to answer in."""


@functools.cache
def hub_answers() -> bool:
    """Whether the hub can be reached; it is asked once, and not again if it cannot."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        # Not exported by name, but there in every version; it is the way through proxies, too.
        importlib.import_module("huggingface_hub.utils").get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # of the library that is asked through, which differs between versions of the hub's
        return False
    return True


@contextlib.contextmanager
def hub_or_cache() -> Iterator[None]:
    """Within, the hub's libraries ask the hub, or only look at what they have kept on disk where it does not answer."""
    import datasets
    from huggingface_hub import constants

    if hub_answers():
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def absence(error: Exception) -> str:
    """Why something was not found on the hub, in a few words.

    Args:
        error: what the library raised.
    """
    if not hub_answers():
        return "the hub does not answer, and nothing of that name is kept on disk"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
