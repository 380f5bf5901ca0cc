"""The one "did you mean"."""

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 12


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the candidates closest to a name, the best first; none where nothing is close."""
    return get_close_matches(name, sorted(set(candidates)), n=count, cutoff=0.6)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error sentence: the nearest names, else all of them, else that there are none."""
    names = sorted(set(candidates))
    close = nearest(name, names)
    if close:
        return "the nearest names are " + ", ".join(map(repr, close))
    if not names:
        return "there are none"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "there are " + ", ".join(map(repr, names[:_SHOWN])) + more
