"""Run a command line that needs torch."""

import sys

from ... import callbacks, lightning_modules
from ...common.messages import silence_noise
from ...common.shown import shown
from . import commands
from .errors import readable_errors
from .lightning_cli import open_cli


def run(args: list[str] | None, words: list[str]) -> None:
    """Run a command, or a subcommand of LightningCLI.

    Args:
        args: the arguments of the program; None for those in `sys.argv`.
        words: the same arguments as a list.

    Raises:
        SystemExit: If the user can fix an error; the status is 2 for the command line, and 1 for a run that stopped.
    """
    silence_noise()
    with readable_errors(debug="--debug" in words):
        callbacks.load_all()  # so that YAML can name callbacks and modules without a module path
        lightning_modules.load_all()
        if words and (command := commands.COMMANDS.get(words[0])):
            message = command([word for word in words[1:] if word != "--debug"])
            sys.stdout.write("".join(f"{shown(line)}\n" for line in message.split("\n")))
            return
        open_cli(args)
