"""What a run was started with: its command, the versions of packages, and the state of git."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from re import match
from typing import Any

from ...common.shown import public


def environment(folder: Path) -> dict[str, Any]:
    """Return the command, the versions, and git's commit with the names of changed files, None outside a repository.

    The command has no secrets of URLs.

    Args:
        folder: A folder of the repository.
    """
    return {
        "command": [public(word) for word in sys.argv],
        "python": platform.python_version(),
        "packages": _versions("vlightning"),
        "git": _git_state(folder),
    }


def _versions(package: str) -> dict[str, str]:
    """Return the installed versions of a package and of what it requires, extras included."""
    try:
        needed = [match(r"[\w.-]+", line) for line in requires(package) or ()]
    except PackageNotFoundError:
        return {}
    found = {}
    for name in sorted({package, *(each.group() for each in needed if each is not None)}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # an extra
            continue
    return found


def _git_state(folder: Path) -> dict[str, Any] | None:
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changed is None:
        return None
    return {"commit": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None without git, outside a repository, or if git takes long."""
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout
