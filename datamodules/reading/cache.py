"""Cache of arrays that are computed from files."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...common.files import replacing
from ...common.shown import shown
from .remote import stamp_of

log = logging.getLogger(__name__)
_VERSION = 1

Arrays = dict[str, np.ndarray]


def index_cache(cache_dir: str | None) -> Path:
    """Return the folder of the cached arrays.

    Args:
        cache_dir: the folder; None for `$XDG_CACHE_HOME/vlightning`, which is `~/.cache/vlightning` by default.
    """
    if cache_dir is not None:
        return Path(os.path.expanduser(cache_dir)).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlightning"


def cached_arrays(file: str, cache: Path, subject: str, make: Callable[[], Arrays]) -> Arrays:
    """Return arrays computed from a file; they are cached until the file's path, size or modification time changes.

    Args:
        file: absolute path or URL.
        cache: folder of the cached arrays.
        subject: what the arrays hold, in the key of the cache and in messages.
        make: function that computes the arrays.
    """
    stamp = hashlib.sha1(f"{_VERSION}\0{stamp_of(file)}\0{subject}".encode()).hexdigest()
    cached = cache / f"{stamp}.npz"
    try:
        with np.load(cached, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass
    computed = make()
    try:
        with replacing(cached) as staged, open(staged, "wb") as content:
            np.savez(content, **computed)  # type: ignore[arg-type]
    except OSError as error:  # the next run computes the arrays again
        log.warning("The %s of %s could not be cached (%s)", subject, shown(file), shown(str(error)))
    return computed
