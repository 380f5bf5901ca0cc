"""Arrays computed from files, kept on disk while the files do not change."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...common.files import replacing

log = logging.getLogger(__name__)
_VERSION = 1

Arrays = dict[str, np.ndarray]


def index_cache(cache_dir: str | None) -> Path:
    """Return the folder of the cached arrays."""
    if cache_dir is not None:
        return Path(os.path.expanduser(cache_dir)).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlightning"


def cached_arrays(file: str, cache: Path, what: str, make: Callable[[], Arrays]) -> Arrays:
    """Return arrays computed from a file, cached while the file does not change.

    Args:
        file: absolute path.
        cache: folder of the cached arrays.
        what: distinguishes the arrays of a file, also in messages.
        make: computes the arrays.
    """
    state = os.stat(file)
    stamp = hashlib.sha1(f"{_VERSION}\0{file}\0{state.st_mtime_ns}\0{state.st_size}\0{what}".encode()).hexdigest()
    kept = cache / f"{stamp}.npz"
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass
    made = make()
    try:
        with replacing(kept) as staged, open(staged, "wb") as content:
            np.savez(content, **made)  # type: ignore[arg-type]
    except OSError as error:  # the next run computes them again
        log.warning("the %s of %s is not cached (%s)", what, file, error)
    return made
