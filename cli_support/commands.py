"""The commands beside those of LightningCLI: `vlightning export`, `convert`, `plan`, `data` and `evaluate`."""

import argparse
from pathlib import Path

from ..callbacks import consolidate_checkpoint, divide_checkpoint_file
from ..common.errors import UserError
from ..common.files import check_free
from ..data_report.command import run_data
from ..datamodules.text.saved_tokenizer import saved_tokenizer
from ..evaluate.command import run_evaluate
from ..lightning_modules.exports import export, exporters
from ..planning.command import run_plan


def run_export(words: list[str]) -> str:
    """Run `vlightning export`.

    Args:
        words: The arguments after `export`.

    Returns:
        A message that names the written files.
    """
    known = exporters()
    parser = _parser(
        "vlightning export",
        "Export the model from a checkpoint, for use without a Trainer, as initial weights of another training, or for "
        "use in other code.",
    )
    parser.add_argument(
        "--layout",
        choices=list(dict.fromkeys(layout for exporter in known.values() for layout in exporter.LAYOUTS)),
        help=" ".join(
            f"Of {name}, by default {next(iter(exporter.LAYOUTS))}: "
            + "; ".join(f"{layout}: {what}" for layout, what in exporter.LAYOUTS.items())
            + "."
            for name, exporter in known.items()
        ),
    )
    typed = parser.parse_args(words)
    return export(typed.checkpoint, typed.target, typed.layout, saved_tokenizer)


def run_convert(words: list[str]) -> str:
    """Run `vlightning convert`.

    Args:
        words: The arguments after `convert`.

    Returns:
        A message that names the written file or folder.

    Raises:
        UserError: If the checkpoint does not exist, or the target exists.
    """
    parser = _parser(
        "vlightning convert",
        "Convert a sharded checkpoint to one file, or a file to a sharded checkpoint. A run resumes from both with any "
        "strategy; the conversion is for programs that read only one of the two, and for copying.",
    )
    parser.add_argument(
        "--processes", type=int, help="number of files with weights in the new folder; only if the checkpoint is a file"
    )
    typed = parser.parse_args(words)
    checkpoint = Path(typed.checkpoint)
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


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(program, description=description, allow_abbrev=False)
    parser.add_argument("checkpoint", help="a .ckpt file, or the folder of a sharded checkpoint")
    parser.add_argument("target", help="the new file or folder, which must not exist")
    return parser


COMMANDS = {"export": run_export, "convert": run_convert, "plan": run_plan, "data": run_data, "evaluate": run_evaluate}
