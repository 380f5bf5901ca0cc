"""Parser of the command line, and its `--help`: all arguments of this package, and one sentence per Trainer argument.

jsonargparse lists all imported subclasses of a type, a thousand for `torch.nn.Module`, and the docstrings of Lightning
in full length.
"""

import inspect
import re
from argparse import SUPPRESS, Action
from typing import Any

from jsonargparse import ActionSubCommands, DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from typing_extensions import override

from ...common.class_arguments import class_bases, listed_subclasses
from ...common.private_api import (
    groups_of_options,
    option_type,
    parser_actions,
    shows_one_class,
    sort_groups,
)
from ...common.verbatim import VerbatimText
from .checkpoints import LastCheckpoint

# Titles of the groups of options by section, in the order of the help.
TITLES = {
    "model": "Model (its own arguments: --model.help NAME)",
    "data": "Data (its own arguments: --data.help NAME)",
    "trainer": "Trainer (documentation: https://lightning.ai/docs/pytorch/stable/common/trainer.html)",
    "checkpoint": "The best checkpoint (documentation: class ModelCheckpoint of Lightning)",
    "last_checkpoint": "The last checkpoint (it also has the other arguments of --checkpoint)",
    "ckpt_path": "Checkpoint to start from",
}
# Options `--<key>.help` that are shown; all others repeat `--help`.
SHOWN_HELP = ("model.help", "data.help", "trainer.callbacks.help")
# Folder of the classes that are listed for a section, since a type such as `torch.nn.Module` allows too many.
CLASS_FOLDERS = {"model": "lightning_modules", "data": "datamodules", "trainer": "callbacks"}


class HelpFormatter(DefaultHelpFormatter):
    """Formatter that lists only the subclasses of this package and of the user's files."""

    def _get_help_string(self, action: Action) -> str:
        text = str(super()._get_help_string(action))
        listed = action.extra_help() if hasattr(action, "extra_help") else ""
        names = ", ".join(sorted(_choices(action))) if listed else ""
        return text.replace(listed, f"; known: {names}" if names else "") if listed else text


class HelpfulParser(VerbatimText, LightningArgumentParser):
    """Parser with a short help, which does not replace the name of a file by its content."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # No abbreviated options: also not of a class, for whose arguments jsonargparse makes a parser of this type.
        super().__init__(*args, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **kwargs})

    @override
    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        # jsonargparse passes a null for a field of a group on as the word `None`, which is not YAML's null.
        if isinstance(args, list) and not subcommand_parsers(self):
            args = [f"{word.removesuffix('None')}null" if word.endswith("=None") else word for word in args]
        return super().parse_args(args, *rest, **kwargs)

    @override
    def dump(self, *args: Any, **kwargs: Any) -> str:
        # A fit dumps its configuration three times; three quarters of each would check again what was parsed.
        return str(super().dump(*args, **(kwargs | {"skip_validation": True})))

    @override
    def format_help(self, *args: Any, **kwargs: Any) -> str:
        if shows_one_class(self):
            self.usage = SUPPRESS
        elif not subcommand_parsers(self):
            self.usage = "%(prog)s [--config FILE.yaml ...] [--OPTION VALUE ...]"
            _shorten(self)
        for action in parser_actions(self):
            if action.dest.endswith(".help") and action.dest not in SHOWN_HELP and not _choices(action):
                action.help = SUPPRESS
        return _plain(str(super().format_help(*args, **kwargs)))


def subcommand_parsers(parser: LightningArgumentParser) -> dict[str, LightningArgumentParser]:
    """Return the parsers of the subcommands by name, of the parser of the whole program; no others have any."""
    choices = [action.choices for action in parser_actions(parser) if isinstance(action, ActionSubCommands)]
    return dict(choices[0]) if choices else {}


def _choices(action: Any) -> dict[str, type]:
    """Return the classes of this package and of the user's files that an argument accepts."""
    bases = class_bases(option_type(action))
    if nn.Module in bases:  # a network of the user's own: any class
        return {}
    return listed_subclasses(bases, CLASS_FOLDERS.get(action.dest.split(".")[0], ""))


def _shorten(parser: LightningArgumentParser) -> None:
    """Set titles and order of a subcommand's sections, and shorten the help of each argument to one sentence."""
    shown_once = {f"last_checkpoint.{name}" for name in inspect.signature(LastCheckpoint).parameters}
    order: dict[int, int] = {}
    for group, actions in groups_of_options(parser):
        for action in actions:
            if action.dest.startswith("last_checkpoint.") and action.dest not in shown_once:
                action.help = SUPPRESS  # shown for the best checkpoint
        visible = [action for action in actions if action.help != SUPPRESS]
        sections = {action.dest.partition(".")[0] for action in visible}
        if title := next((title for title in TITLES if title in sections), None):
            order[id(group)] = 1 + list(TITLES).index(title)
            group.title = TITLES[title]
            for action in visible:
                action.help = _first_sentence(action.help or "")
    sort_groups(parser, lambda group: order.get(id(group), 0))


def _first_sentence(text: str) -> str:
    """Return the first sentence of a description, without reStructuredText."""
    text = re.sub(r"Default: .*|^Defaults to None. ", "", _plain(" ".join(text.split())))
    return re.split(r"(?<=[^.]{3}\.) (?=[A-Z])", text, maxsplit=1)[0].strip()


def _plain(text: str) -> str:
    """Return text without the markup of reStructuredText: `name` and `Name`."""
    return re.sub(r":\w+:`([^`]*)`|``([^`]*)``", r"\1\2", text)
