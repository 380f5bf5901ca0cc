"""Files that are being written: marked as such, and cleared away once nobody writes them any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from pathlib import Path

STAGED = ".incomplete-"
_AGE = 3600
"""Seconds without a write after which a leftover is looked at: a writer marks its file just after it has made it."""


def staged_path(target: Path) -> Path:
    """A name beside a file or folder, to write it under before it gets its own."""
    return target.with_name(f"{STAGED}{uuid.uuid4().hex}")


def mark(descriptor: int) -> None:
    """Mark an open file or folder as being written, for as long as it is open; the system unmarks what a kill leaves.

    (A lock, and no process id in the name: containers that share a disk number their processes apart.)
    """
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def clear_leftovers(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder; what a living one is writing stays.

    Where the file system has no locks nobody can tell, and all stays.
    """
    try:
        found = list(folder.glob(f"{STAGED}*"))
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _AGE and _is_free(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
