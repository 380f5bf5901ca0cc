"""The parser of the command line, and its `--help`: every argument of this package, the Trainer's in a sentence each.

jsonargparse shows each type's imported subclasses, of which `torch.nn.Module` has a thousand, and Lightning's
docstrings in full length.
"""

import inspect
import re
from argparse import SUPPRESS, Action
from typing import Any

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from ..callbacks.checkpoints.last import LastCheckpoint
from ..common.class_arguments import class_bases, members, own_subclasses
from ..common.private_api import (
    groups_of_options,
    has_subcommands,
    option_type,
    parser_actions,
    shows_one_class,
    sort_groups,
    take_text_verbatim,
)

# Titles of the groups of options, in their order, by the section that a group holds.
TITLES = {
    "model": "Model (its own arguments: --model.help NAME)",
    "data": "Data (its own arguments: --data.help NAME)",
    "trainer": "Trainer (at length: https://lightning.ai/docs/pytorch/stable/common/trainer.html)",
    "checkpoint": "The best checkpoint (at length: class ModelCheckpoint in Lightning's documentation)",
    "last_checkpoint": "The last checkpoint (and the other arguments of --checkpoint)",
    "ckpt_path": "Checkpoint to start from",
}
# Every other `--<key>.help` repeats `--help`.
HELPFUL = ("model.help", "data.help", "trainer.callbacks.help")
# The folder of the classes that a section can name, if its type is any `torch.nn.Module`.
ROOMS = {"model": "lightning_modules", "data": "datamodules", "trainer": "callbacks"}


class HelpFormatter(DefaultHelpFormatter):
    """Lists the subclasses of this package and of the user's files only."""

    def _get_help_string(self, action: Action) -> str:
        text = str(super()._get_help_string(action))
        listed = action.extra_help() if hasattr(action, "extra_help") else ""
        names = ", ".join(sorted(_choices(action))) if listed else ""
        return text.replace(listed, f"; known: {names}" if names else "") if listed else text


class HelpfulParser(LightningArgumentParser):
    """A parser with a short help, which never reads a file where the file's name belongs.

    jsonargparse takes text for the name of a config file wherever a type holds a class: `train: str | Source | ...`
    then gets the content of `pairs.csv` for a name. Here that is off for every argument that takes text itself, of
    classes within classes too, since jsonargparse makes their parsers of this class. An argument that takes nothing but
    a class is still read from a file: `--model model.yaml`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    @override
    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        # jsonargparse hands a null for a field of a group on as the word `None`, which is no YAML.
        if isinstance(args, list) and not has_subcommands(self):
            args = [f"{word.removesuffix('None')}null" if word.endswith("=None") else word for word in args]
        return super().parse_args(args, *rest, **kwargs)

    @override
    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        return self._with_verbatim_text(super().add_class_arguments(*args, **kwargs))

    @override
    def add_function_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        return self._with_verbatim_text(super().add_function_arguments(*args, **kwargs))

    def _with_verbatim_text(self, added: list[str]) -> list[str]:
        for action in parser_actions(self):
            if str in members(option_type(action)):
                take_text_verbatim(action)
        return added

    @override
    def format_help(self, *args: Any, **kwargs: Any) -> str:
        if shows_one_class(self):
            self.usage = SUPPRESS
        elif not has_subcommands(self):
            self.usage = "%(prog)s [--config FILE.yaml ...] [--OPTION VALUE ...]"
            _shorten(self)
        for action in parser_actions(self):
            if action.dest.endswith(".help") and action.dest not in HELPFUL and not _choices(action):
                action.help = SUPPRESS
        return _plain(str(super().format_help(*args, **kwargs)))


def _choices(action: Any) -> dict[str, type]:
    """Return the classes that an argument can take, without those of other packages."""
    return own_subclasses(class_bases(option_type(action)), ROOMS.get(action.dest.split(".")[0], ""))


def _shorten(parser: LightningArgumentParser) -> None:
    """Give the sections of a subcommand titles, in their order, and Lightning's arguments one sentence each."""
    shown_once = {f"last_checkpoint.{name}" for name in inspect.signature(LastCheckpoint).parameters}
    order: dict[int, int] = {}
    for group, actions in groups_of_options(parser):
        for action in actions:
            if action.dest.startswith("last_checkpoint.") and action.dest not in shown_once:
                action.help = SUPPRESS  # as for the best checkpoint
        shown = [action for action in actions if action.help != SUPPRESS]
        sections = {action.dest.partition(".")[0] for action in shown}
        if title := next((title for title in TITLES if title in sections), None):
            order[id(group)] = 1 + list(TITLES).index(title)
            group.title = TITLES[title]
            for action in shown:
                action.help = _first_sentence(action.help or "")
    sort_groups(parser, lambda group: order.get(id(group), 0))


def _first_sentence(text: str) -> str:
    """Return Lightning's description up to the end of its first sentence, without reStructuredText."""
    text = re.sub(r"Default: .*|^Defaults to None. ", "", _plain(" ".join(text.split())))
    return re.split(r"(?<=[^.]{3}\.) (?=[A-Z])", text, maxsplit=1)[0].strip()


def _plain(text: str) -> str:
    """Return text without the marks of reStructuredText: ``name`` and :class:`Name`."""
    return re.sub(r":\w+:`([^`]*)`|``([^`]*)``", r"\1\2", text)
