"""Start of the commands that need torch: those of LightningCLI, and those beside, such as `vlightning export`."""

import atexit
import sys
from importlib import import_module

import torch.distributed as dist

from ... import callbacks, lightning_modules
from ...common.messages import short_warnings, silence_noise
from ...common.shown import shown
from .errors import readable_errors
from .lightning_cli import open_cli

# Folder of each command beside those of LightningCLI. Its `command.py` is imported when it runs.
COMMANDS = {
    "export": "export",
    "push": "export",
    "convert": "export",
    "plan": "plan",
    "data": "data",
    "embed": "embed",
    "search": "search",
    "evaluate": "evaluate",
    "demo": "demo",
}


@atexit.register
def end_process_groups() -> None:
    """End torch's process groups while Python still runs: with one left, a process that has done its work may abort.

    Lightning (2.6.6) does so for NCCL alone. torchrun and SLURM take the abort (SIGABRT, pytorch#190489) for a failure.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run(args: list[str] | None, words: list[str]) -> None:
    """Run a command, or a subcommand of LightningCLI.

    Raises:
        SystemExit: If the user can fix an error; the status is 2 for the command line, and 1 for a run that stopped.
    """
    silence_noise()
    with short_warnings(), readable_errors(debug="--debug" in words):
        callbacks.load_all()  # so that YAML can name callbacks without a module path
        if words and (folder := COMMANDS.get(words[0])):
            lightning_modules.load_all()
            module = import_module(f"...{folder}.command", __name__)
            message = getattr(module, f"run_{words[0]}")([word for word in words[1:] if word != "--debug"])
            sys.stdout.write("".join(f"{shown(line)}\n" for line in message.split("\n")))
            return
        open_cli(args)
