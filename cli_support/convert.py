"""`vlightning convert CHECKPOINT TARGET`: a sharded checkpoint into one file, or a file into a sharded checkpoint."""

import argparse
from pathlib import Path

from ..callbacks import consolidate_checkpoint, divide_checkpoint_file
from ..common.errors import UserError
from ..common.files import check_free

DESCRIPTION = (
    "Make one file of a sharded checkpoint, or a sharded checkpoint of a file. A run goes on from either, whatever its "
    "strategy: this is for programs that read one kind only, and for copying."
)


def run(words: list[str]) -> str:
    """Run `vlightning convert` with the words after `convert`, and return what was written.

    Raises:
        UserError: If there is no such checkpoint.
        FileExistsError: If the target exists.
        RuntimeError: If the checkpoint cannot be read.
        ValueError: If `--processes` is less than 1.
    """
    parser = argparse.ArgumentParser("vlightning convert", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("checkpoint", help="the folder of a sharded checkpoint, or a file")
    parser.add_argument("target", help="the file, or the folder, to write; must not exist")
    parser.add_argument("--processes", type=int, help="number of files with weights in the folder; only for a file")
    typed = parser.parse_args(words)
    folder = Path(typed.checkpoint).is_dir()
    if typed.processes is not None and folder:
        parser.error("--processes is for a file, and the checkpoint is a folder already: it becomes one file")
    if not Path(typed.checkpoint).exists():
        raise UserError(f"Found no checkpoint {typed.checkpoint!r}, expected a file or a folder of a training.")
    check_free(Path(typed.target))
    if folder:
        consolidate_checkpoint(typed.checkpoint, typed.target)
    else:
        divide_checkpoint_file(typed.checkpoint, typed.target, 1 if typed.processes is None else typed.processes)
    return f"Wrote {typed.target}."
