"""Export of a training's checkpoint by the method whose class it names.

`ALBEFModule` is exported by `lightning_modules/albef/export.py`, with `LAYOUTS` (name to description, the default
first) and `export(checkpoint, source, target, layout)`, which returns a sentence about the files written. An `export`
with a parameter `tokenizer_of` gets the function that reads the tokenizer of a checkpoint's data.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import lightning_modules
from ..callbacks import AtomicCheckpointIO
from ..common.errors import UserError
from ..common.files import check_free
from .base.checkpoints import class_of, saved_settings

TASKS_OF_ALBEF = ("EntailmentModule", "NLVR2Module", "TextAssignmentModule", "VQAModule")
"""Methods that `lightning_modules/albef/downstream/export.py` exports."""


def exporters() -> dict[str, ModuleType]:
    """Return the `export` module of each method that has one, by the class of its checkpoints."""
    root = lightning_modules.__name__
    folders = {name: f"{root}.{name.removesuffix('Module').lower()}" for name in lightning_modules.__all__}
    folders |= {name: f"{root}.albef.downstream" for name in TASKS_OF_ALBEF}
    return {
        name: import_module(f"{folder}.export")
        for name, folder in folders.items()
        if find_spec(folder) and find_spec(f"{folder}.export")
    }


def export(
    checkpoint: str, target: str, layout: str | None = None, tokenizer_of: Callable[..., Any] | None = None
) -> str:
    """Write the model of a training checkpoint, and return a sentence about what was written.

    Args:
        checkpoint: A checkpoint file, or the folder of a sharded one.
        target: The file or folder to write.
        layout: One of those of the checkpoint's class; None takes its first.
        tokenizer_of: Reads the tokenizer of a checkpoint's data; methods do not import datamodules. None exports none.

    Raises:
        UserError: If the checkpoint does not exist, is not of a module that can be exported, or not in this layout; or
            the target exists.
        RuntimeError: If the checkpoint cannot be read.
    """
    if not Path(checkpoint).exists():
        raise UserError(
            f"Expected a .ckpt file of a training, got {checkpoint!r}, which does not exist: correct the path."
        )
    check_free(Path(target))
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    known = exporters()
    name = _class_name(content, checkpoint, list(known))
    layouts = known[name].LAYOUTS
    if layout not in (None, *layouts):
        raise UserError(
            f"Expected {' or '.join(layouts)} as the layout of {name}, the class of {checkpoint!r}, got {layout!r}: "
            "correct it."
        )
    write = known[name].export
    takes_tokenizer = tokenizer_of is not None and "tokenizer_of" in inspect.signature(write).parameters
    options = {"tokenizer_of": tokenizer_of} if takes_tokenizer else {}
    return str(write(content, f"the checkpoint {checkpoint!r}", target, layout or next(iter(layouts)), **options))


def _class_name(content: Mapping[str, Any], checkpoint: str, known: list[str]) -> str:
    """Return the name of the class of a checkpoint."""
    if not isinstance(content.get("hyper_parameters"), Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise UserError(
            f"Expected a checkpoint that `vlightning fit` or a Trainer wrote, got {checkpoint!r} without "
            "hyper_parameters beside a state_dict: give another."
        )
    name = class_of(saved_settings(content))
    if name is None or name not in known:
        raise UserError(
            f"Expected a checkpoint of {' or '.join(known)}, got one of {name or 'an unknown class'} in "
            f"{checkpoint!r}: give another."
        )
    return name
