"""Finding what a dotted attribute path names, with an error that says what is there instead."""

from difflib import get_close_matches
from typing import Any

from torch import nn


def nearest(name: str, candidates: list[str]) -> str:
    """Returns the end of an error sentence: the closest candidates, else all of them, else that there are none."""
    close = get_close_matches(name, candidates, n=3, cutoff=0.6)
    if close:
        return "the nearest names are " + ", ".join(repr(candidate) for candidate in close)
    if not candidates:
        return "it has none"
    listed = ", ".join(repr(candidate) for candidate in candidates[:12])
    return f"it has {listed}" + (f" and {len(candidates) - 12} more" if len(candidates) > 12 else "")


def find_module(root: nn.Module, path: str, kind: type[nn.Module], asked_by: str) -> Any:
    """Returns the submodule at a dotted attribute path.

    Args:
        root: Where the path starts, as a rule the LightningModule.
        path: Attribute names joined by dots, such as `text_encoder.bert`.
        kind: The class that is expected there.
        asked_by: Who needs it, for the error sentence, such as `source of the EMA pair 'image'`.

    Returns:
        The attribute, an instance of `kind`.

    Raises:
        AttributeError: If a name on the path does not exist.
        TypeError: If the path ends at something else than a `kind`.
    """
    found: Any = root
    for depth, name in enumerate(path.split(".")):
        if not hasattr(found, name):
            where = ".".join([type(root).__name__, *path.split(".")[:depth]])
            there = [child for child, _ in found.named_children()] if isinstance(found, nn.Module) else []
            raise AttributeError(
                f"The {asked_by} is given as {path!r}, but {where} has no submodule {name!r}: {nearest(name, there)}."
            )
        found = getattr(found, name)
    if not isinstance(found, kind):
        raise TypeError(
            f"The {asked_by} is given as {path!r}, which is of type {type(found).__name__}; "
            f"expected an instance of {kind.__name__}, so give the path of one."
        )
    return found
