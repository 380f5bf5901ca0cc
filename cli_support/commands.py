"""`vlightning export CHECKPOINT TARGET` and `vlightning convert CHECKPOINT TARGET`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ..callbacks import consolidate_checkpoint, divide_checkpoint_file
from ..common.errors import UserError
from ..common.files import check_free
from ..datamodules.text.saved_tokenizer import saved_tokenizer
from ..lightning_modules.exports import export, exporters


def run_export(words: list[str]) -> str:
    """Run `vlightning export` with the words after `export`, and return what was written."""
    known = exporters()
    parser = _parser(
        "vlightning export",
        "Take the model out of a training's checkpoint: to use it without a Trainer, to start another training from "
        "it, or to use it in other code.",
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
    """Run `vlightning convert` with the words after `convert`, and return what was written."""
    parser = _parser(
        "vlightning convert",
        "Make one file of a sharded checkpoint, or a sharded checkpoint of a file. A run goes on from either, whatever "
        "its strategy: this is for programs that read one kind only, and for copying.",
    )
    parser.add_argument("--processes", type=int, help="number of files with weights in the folder; only for a file")
    typed = parser.parse_args(words)
    checkpoint = Path(typed.checkpoint)
    if typed.processes is not None and checkpoint.is_dir():
        parser.error("--processes is for a file, and the checkpoint is a folder already: it becomes one file")
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
    parser.add_argument("checkpoint", help="a .ckpt file of a training, or the folder of a sharded checkpoint")
    parser.add_argument("target", help="the file or the folder to write; must not exist")
    return parser


COMMANDS: dict[str, Callable[[list[str]], str]] = {"export": run_export, "convert": run_convert}
