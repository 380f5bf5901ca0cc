"""The commands beside those of LightningCLI, such as `vlightning export`, and the start of each that needs torch."""

import argparse
import sys
from pathlib import Path

from ... import callbacks, lightning_modules
from ...callbacks import consolidate_checkpoint, divide_checkpoint_file
from ...common.errors import UserError
from ...common.files import check_free
from ...common.messages import silence_noise
from ...common.shown import shown
from ..data.command import run_data
from ..demo.command import run_demo
from ..embed.command import run_embed
from ..evaluate.command import run_evaluate
from ..export.command import run_export, run_push
from ..plan.command import run_plan
from ..search.command import run_search
from .errors import readable_errors
from .lightning_cli import open_cli
from .run_checkpoints import resolved


def run_convert(words: list[str]) -> str:
    """Run `vlightning convert`.

    Args:
        words: The arguments after `convert`.

    Returns:
        A message that names the written file or folder.

    Raises:
        UserError: If the checkpoint does not exist, or the target exists.
    """
    parser = argparse.ArgumentParser(
        "vlightning convert",
        description="Convert a sharded checkpoint to one file, or a file to a sharded checkpoint. A run resumes from "
        "both with any strategy; the conversion is for programs that read only one of the two, and for copying.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a .ckpt file, the folder of a sharded checkpoint, or that of a run")
    parser.add_argument("target", help="the new file or folder, which must not exist")
    parser.add_argument(
        "--processes", type=int, help="number of files with weights in the new folder; only if the checkpoint is a file"
    )
    typed = parser.parse_args(words)
    checkpoint = resolved(typed.checkpoint)
    if typed.processes is not None and checkpoint.is_dir():
        parser.error("Expected --processes with a checkpoint in one file, got a folder: leave the option out.")
    if not checkpoint.exists():
        raise UserError(
            f"Expected a checkpoint, a file or a folder, got {typed.checkpoint!r}, which does not exist: correct it."
        )
    check_free(Path(typed.target))
    if checkpoint.is_dir():
        consolidate_checkpoint(checkpoint, typed.target)
    else:
        divide_checkpoint_file(checkpoint, typed.target, 1 if typed.processes is None else typed.processes)
    return f"Wrote {typed.target}."


COMMANDS = {
    "export": run_export,
    "push": run_push,
    "convert": run_convert,
    "plan": run_plan,
    "data": run_data,
    "embed": run_embed,
    "search": run_search,
    "evaluate": run_evaluate,
    "demo": run_demo,
}


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
        if words and (command := COMMANDS.get(words[0])):
            message = command([word for word in words[1:] if word != "--debug"])
            sys.stdout.write("".join(f"{shown(line)}\n" for line in message.split("\n")))
            return
        open_cli(args)
