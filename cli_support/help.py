"""What `--help` shows: every argument of this package, the Trainer's in one sentence each, no other package's classes.

jsonargparse shows each type's imported subclasses, of which `torch.nn.Module` has a thousand, and Lightning's
docstrings in full length.
"""

import inspect
import re
from argparse import SUPPRESS, Action
from typing import Any

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch import LightningModule
from typing_extensions import override

from ..common.class_arguments import class_bases
from .checkpoints import LastCheckpoint
from .mistakes import own_subclasses
from .parser import VerbatimParser

TITLES = {
    "model": "Model (its own arguments: --model.help NAME)",
    "data": "Data (its own arguments: --data.help NAME)",
    "trainer": "Trainer (at length: https://lightning.ai/docs/pytorch/stable/common/trainer.html)",
    "checkpoint": "The best checkpoint (at length: class ModelCheckpoint in Lightning's documentation)",
    "last_checkpoint": "The last checkpoint (and the other arguments of --checkpoint)",
    "ckpt_path": "Checkpoint to start from",
}
# The rest of `--<key>.help` says nothing that `--help` does not.
HELPFUL = ("model.help", "data.help", "trainer.callbacks.help")
# Where the classes are that an argument of a section can take, if it can take any `torch.nn.Module`.
HOMES = {
    "model": "vlightning.lightning_modules.",
    "data": "vlightning.datamodules.",
    "trainer": "vlightning.callbacks.",
}


class HelpFormatter(DefaultHelpFormatter):
    """Names of the known subclasses are those of this package and of the user's files."""

    def _get_help_string(self, action: Action) -> str:
        text = str(super()._get_help_string(action))
        listed = action.extra_help() if hasattr(action, "extra_help") else ""
        if not listed:
            return text
        names = ", ".join(sorted(_choices(action)))
        return text.replace(listed, f"; known: {names}" if names else "")


class HelpfulParser(VerbatimParser):
    """The parser of the command line, with a help that is as long as what it has to say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    @override
    def format_help(self, *args: Any, **kwargs: Any) -> str:
        if getattr(self, "_inner_parser", False):  # the help of one class
            self.usage = SUPPRESS
        elif self._subcommands_action is None:
            self.usage = "%(prog)s [--config FILE.yaml ...] [--OPTION VALUE ...]"
            _shorten(self)
        _hide_nested_help(self)
        return _plain(str(super().format_help(*args, **kwargs)))


def _choices(action: Any) -> list[str]:
    """Names of the classes that an argument can take, other packages' left out."""
    bases = class_bases(action._typehint)
    section = action.dest.split(".")[0]
    models = any(issubclass(base, LightningModule) for base in bases)
    return [
        name
        for name, cls in own_subclasses(bases).items()
        if (models or not issubclass(cls, LightningModule))
        and (not cls.__module__.startswith("vlightning.") or cls.__module__.startswith(HOMES.get(section, "")))
    ]


def _shorten(parser: VerbatimParser) -> None:
    """Give the sections of a subcommand titles, the own ones first, and Lightning's arguments one sentence."""
    for action in parser._actions:
        section, _, name = action.dest.partition(".")
        if section == "last_checkpoint" and name and name not in inspect.signature(LastCheckpoint).parameters:
            action.help = SUPPRESS  # as for the best checkpoint
    parser._action_groups.sort(key=_is_lightnings)
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != SUPPRESS]
        sections = {action.dest.split(".")[0] for action in shown}
        title = next((TITLES[name] for name in TITLES if name in sections), None)
        if title is not None:
            group.title = title
            for action in shown:
                action.help = _first_sentence(action.help or "")


def _is_lightnings(group: Any) -> bool:
    """Whether a section of the help comes after those of the model and the data."""
    sections = {action.dest.split(".")[0] for action in group._group_actions}
    return not sections & {"help", "model", "data"}


def _hide_nested_help(parser: VerbatimParser) -> None:
    for action in parser._actions:
        known = hasattr(action, "_typehint") and not _choices(action)
        if action.dest.endswith(".help") and action.dest not in HELPFUL and known:
            action.help = SUPPRESS


def _first_sentence(text: str) -> str:
    """Lightning's description without what follows its first sentence, and without reStructuredText."""
    text = re.sub(r"Default: .*|^Defaults to None. ", "", _plain(" ".join(text.split())))
    return re.split(r"(?<=[^.]{3}\.) (?=[A-Z])", text, maxsplit=1)[0].strip()


def _plain(text: str) -> str:
    """Without the marks of reStructuredText: ``name`` and :class:`Name`."""
    return re.sub(r":\w+:`([^`]*)`|``([^`]*)``", r"\1\2", text)
