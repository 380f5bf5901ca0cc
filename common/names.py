"""Nearest names for error messages."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_SHOWN = 12


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the candidates closest to a name, best first, ignoring case; empty if none is close."""
    lowered = {candidate.lower(): candidate for candidate in sorted(set(candidates))}
    return [lowered[match] for match in get_close_matches(name.lower(), list(lowered), n=count, cutoff=0.5)]


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error message: the nearest name, or else all names, or else that there are none.

    Args:
        name: The unknown name.
        candidates: The known names.
        prefix: Written before each candidate, as in `--trainer.`.
    """
    names = sorted(set(candidates))
    close = nearest(name, names, count=1)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    if not names:
        return "there are none."
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "use one of " + ", ".join(prefix + name for name in names[:_SHOWN]) + more + "."


def nearest_path(path: str) -> str:
    """Return a hint, for messages, at a path similar to one that does not exist; empty if there is none."""
    folder = Path(os.path.expanduser(path)).parent
    if not folder.is_dir():
        return ""
    near = nearest(Path(path).name, [entry.name for entry in folder.iterdir()], 1)
    return f" (there is {str(folder / near[0])!r})" if near else ""
