"""Every private name of jsonargparse, Lightning and torch that the command line and the loading of checkpoints use.

Each stands here once, with the reason why no public name serves.
"""

from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse._parameter_resolvers import get_signature_parameters
from lightning.fabric.utilities.cloud_io import _load


def constructor_parameters(cls: type) -> list[Any]:
    """Return a class's constructor parameters as the parser sees them, each with name, annotation, default and kind.

    `inspect.signature` shows `**kwargs` in place of the arguments of the base class that it passes on to.
    """
    return list(get_signature_parameters(cls, None, logger=False))


def parser_actions(parser: ArgumentParser) -> list[Any]:
    """Return the options of a parser; jsonargparse lists them nowhere else."""
    return list(parser._actions)


def option_type(action: Any) -> Any:
    """Return the type of an option's value; `action.type` is None for every type that is not a plain class."""
    return getattr(action, "_typehint", action.type)


def take_text_verbatim(action: Any) -> None:
    """Stop an option from replacing the name of a file by the file's content."""
    action._enable_path = False


def load_plain(path: Any) -> Any:
    """Load a checkpoint from a file, path or URL without weights and without running code; Lightning's own reader."""
    return _load(path, map_location="meta", weights_only=True)
