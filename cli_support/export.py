"""`vlightning export CHECKPOINT TARGET`: the weights of a training checkpoint, for other code or another training."""

import argparse
import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import lightning_modules
from ..callbacks import AtomicCheckpointIO
from ..common.errors import UserError
from ..common.files import check_free
from ..datamodules.text.saved_tokenizer import saved_tokenizer

DESCRIPTION = (
    "Take the model out of a training's checkpoint: to use it without a Trainer, to start another training from it, or "
    "to use it in other code."
)


def exporters() -> dict[str, ModuleType]:
    """Return the `export` module of each method that has one, by the class of its checkpoints.

    `ALBEFModule` is exported by `lightning_modules/albef/export.py`, with `LAYOUTS` (name to description, the default
    first) and `export(checkpoint, source, target, layout)`, which returns a sentence about the files written. An
    `export` with a parameter `tokenizer_of` gets the function that reads the tokenizer of a checkpoint's data.
    """
    root = lightning_modules.__name__
    modules = {name: f"{root}.{name.removesuffix('Module').lower()}" for name in lightning_modules.__all__}
    folders = {name: module for name, module in modules.items() if find_spec(module)}
    return {
        name: import_module(f"{module}.export") for name, module in folders.items() if find_spec(f"{module}.export")
    }


def run(words: list[str]) -> str:
    """Run `vlightning export` with the words after `export`, and return what was written."""
    known = exporters()
    parser = argparse.ArgumentParser("vlightning export", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("checkpoint", help="a .ckpt file that a training wrote, or the folder of a sharded one")
    parser.add_argument("target", help="the folder or the file to write; must not exist")
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
    return export(typed.checkpoint, typed.target, typed.layout)


def export(checkpoint: str, target: str, layout: str | None = None) -> str:
    """Write the model of a training checkpoint, and return a sentence about what was written.

    Args:
        checkpoint: A checkpoint file, or the folder of a sharded one.
        target: The file or folder to write.
        layout: One of those of the checkpoint's class; None takes its first.

    Raises:
        UserError: If the checkpoint does not exist, is not of a module that can be exported, or not in this layout.
        FileExistsError: If the target exists.
        RuntimeError: If the checkpoint cannot be read.
    """
    if not Path(checkpoint).exists():
        raise UserError(f"Found no checkpoint {checkpoint!r}, expected a .ckpt file of a training.")
    check_free(Path(target))
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    known = exporters()
    name = _class_name(content, checkpoint, list(known))
    layouts = known[name].LAYOUTS
    if layout not in (None, *layouts):
        raise UserError(
            f"Found a checkpoint of {name} in {checkpoint!r}, which is not written in the layout {layout!r}: give "
            f"{' or '.join(layouts)}."
        )
    write = known[name].export
    options = {"tokenizer_of": saved_tokenizer} if "tokenizer_of" in inspect.signature(write).parameters else {}
    return str(write(content, f"the checkpoint {checkpoint!r}", target, layout or next(iter(layouts)), **options))


def _class_name(content: Mapping[str, Any], checkpoint: str, known: list[str]) -> str:
    """Return the name of the class of a checkpoint."""
    arguments, state = content.get("hyper_parameters"), content.get("state_dict")
    if not isinstance(arguments, Mapping) or not isinstance(state, Mapping):
        raise UserError(
            f"Found no hyper_parameters beside a state_dict in {checkpoint!r}, expected a checkpoint that "
            "`vlightning fit` or a Trainer wrote."
        )
    if "_class_path" not in arguments:  # written without the command line, which alone stores the class
        given = arguments.keys()
        return max(known, key=lambda name: len(inspect.signature(getattr(lightning_modules, name)).parameters & given))
    name = str(arguments["_class_path"]).rsplit(".", 1)[-1]
    if name not in known:
        raise UserError(f"Found a checkpoint of {name} in {checkpoint!r}, expected one of {' or '.join(known)}.")
    return name
