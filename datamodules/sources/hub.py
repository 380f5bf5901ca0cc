"""Access to the Hugging Face hub, with a short timeout: its libraries wait 20 s and more for an unreachable hub."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

TIMEOUT = 10.0
"""Timeout in seconds."""


@functools.cache
def hub_answers() -> bool:
    """Return whether the hub can be reached; tried once per process."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        # Not exported by name, but present in every version; it supports proxies.
        importlib.import_module("huggingface_hub.utils").get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # of the HTTP library, which differs between versions of huggingface_hub
        return False
    return True


@contextlib.contextmanager
def hub_or_cache() -> Iterator[None]:
    """Let the hub's libraries read only their cache on disk within the context if the hub cannot be reached."""
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
    """Return why something was not found on the hub, for messages.

    Args:
        error: the error of the library.
    """
    if not hub_answers():
        return "the hub cannot be reached, and nothing of that name is cached"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
