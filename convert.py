"""Checkpoints from a file to a folder and back: `python -m vlightning.convert <checkpoint> <target>`."""

import argparse
import sys
from pathlib import Path

from vlightning.callbacks import consolidate_checkpoint, divide_checkpoint_file
from vlightning.callbacks.checkpoints.checkpoint_io import check_free
from vlightning.cli_support.report import readable_errors

DESCRIPTION = (
    "Make one file of a sharded checkpoint, or a sharded checkpoint of a file. A run goes on from either, whatever its "
    "strategy: this is for programs that read one kind only, and for copying."
)


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: The words after the program's name; None takes them from `sys.argv`.

    Raises:
        SystemExit: With status 2 for what cannot be understood, 1 for a checkpoint that cannot be converted.
    """
    parser = argparse.ArgumentParser("python -m vlightning.convert", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("checkpoint", help="the folder of a sharded checkpoint, or a file")
    parser.add_argument("target", help="the file, or the folder, to write; must not exist")
    parser.add_argument("--processes", type=int, help="number of files with weights in the folder; only for a file")
    words = parser.parse_args(args)
    if words.processes is not None and Path(words.checkpoint).is_dir():
        parser.error("--processes is for a file, and the checkpoint is a folder already: it becomes one file")
    with readable_errors(program="vlightning.convert"):
        convert(words.checkpoint, words.target, words.processes)
        sys.stdout.write(f"Wrote {words.target}.\n")


def convert(checkpoint: str, target: str, processes: int | None = None) -> None:
    """Write the other kind of a checkpoint, with all that it holds.

    Args:
        checkpoint: A folder, which becomes a file, or a file, which becomes a folder.
        target: What to write.
        processes: Number of files with weights in the folder; None makes 1.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the target is there already.
        RuntimeError: If it cannot be read.
        ValueError: If there is to be no file with weights.
    """
    if not Path(checkpoint).exists():
        raise FileNotFoundError(f"Found no checkpoint {checkpoint!r}, expected a file or a folder of a training.")
    check_free(Path(target))
    if Path(checkpoint).is_dir():
        consolidate_checkpoint(checkpoint, target)
    else:
        divide_checkpoint_file(checkpoint, target, 1 if processes is None else processes)


if __name__ == "__main__":
    main()
