"""Access to the Hugging Face hub with a short timeout.

The libraries of the hub wait 20 s or more for an unreachable hub.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

TIMEOUT = 10.0
"""Timeout, seconds."""


@functools.cache
def hub_is_reachable() -> bool:
    """Return whether the hub can be reached; the connection is tried once per process."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        # The submodule does not declare `get_session` as exported, but every version has it; it supports proxies.
        importlib.import_module("huggingface_hub.utils").get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # the HTTP library, and so the type, depends on the version of huggingface_hub
        return False
    return True


@contextlib.contextmanager
def hub_or_cache() -> Iterator[None]:
    """Restrict the hub's libraries to their cache on disk within the context if the hub cannot be reached."""
    import datasets
    from huggingface_hub import constants

    if hub_is_reachable():
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def reason_not_found(error: Exception) -> str:
    """Return the reason, for messages, why a name was not found on the hub."""
    if not hub_is_reachable():
        return "the hub cannot be reached, and nothing of that name is cached"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason_refused(error: Exception, what: str) -> str:
    """Return the reason, for messages, why the hub did not give a repository, such as a "data set"."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    causes = list(_causes(error))
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return "it is gated: accept its terms on its page, and log in with `hf auth login`"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return f"there is no such {what}, or it is private: log in with `hf auth login`"
    return reason_not_found(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
