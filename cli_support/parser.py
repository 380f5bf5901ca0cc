"""The parser of the command line: text stays as it was typed, also where a file has that name."""

from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from ..common.class_arguments import members


class VerbatimParser(LightningArgumentParser):
    """A parser that never puts a file's content where the file's name belongs.

    jsonargparse takes text for the name of a config file wherever a type holds a class: `train: str | Source | ...`
    then gets the pairs in `pairs.json` for a list of sources, and the content of `pairs.csv` for a name. Here that is
    off for every argument that takes text itself, of classes within classes too, since jsonargparse makes their parsers
    of this class. An argument that takes nothing but a class is still read from a file: `--model model.yaml`.
    """

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add a class's arguments."""
        added = super().add_class_arguments(*args, **kwargs)
        _leave_text(self)
        return added

    def add_function_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add a function's arguments."""
        added = super().add_function_arguments(*args, **kwargs)
        _leave_text(self)
        return added


def _leave_text(parser: ArgumentParser) -> None:
    for action in parser._actions:
        if str in members(getattr(action, "_typehint", None)):
            action._enable_path = False
