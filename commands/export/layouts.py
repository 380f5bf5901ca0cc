"""Export of a training's checkpoint in a layout of the class that it names.

Every module is exported as a folder of `save_pretrained`. Further layouts of a method are in its `export.py`, for
`ALBEFModule` in `lightning_modules/albef/export.py`: `LAYOUTS` (name to description) and
`export(checkpoint, source, target, layout)`, which returns a sentence about the files written. An `export` with a
parameter `tokenizer_of` gets the function that reads the tokenizer of a checkpoint's data. The first of a class's
layouts is its default.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ... import lightning_modules
from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ...common.files import check_free, run_folder_of
from ...common.preprocessing import described, recorded_preprocessing
from ...lightning_modules.base.method import Method
from ...lightning_modules.base.pretrained import LAYOUT, export_folder, rebuild
from ...lightning_modules.core.checkpoints import ORDERS_KEY, class_of, is_checkpoint, saved_settings
from ...lightning_modules.core.tokenizer_reader import TokenizerOf, read_tokenizer
from ..cli.run_checkpoints import resolved

FOLDER = "vlightning"
"""Name of the layout of every module."""
TASKS_OF_ALBEF = ("EntailmentModule", "NLVR2Module", "TextAssignmentModule", "VQAModule")
"""Methods that `lightning_modules/albef/downstream/export.py` exports."""
INCOMPLETE = ("ReinforcementModule",)
"""Methods without an export, which do not train."""


def exported_classes() -> dict[str, type[Method]]:
    """Return the modules that can be exported, by name."""
    known = {name: getattr(lightning_modules, name) for name in lightning_modules.__all__ if name not in INCOMPLETE}
    return {name: cls for name, cls in known.items() if isinstance(cls, type) and issubclass(cls, Method)}


def layouts() -> dict[str, dict[str, str]]:
    """Return the description of each layout by class, the default first."""
    own = {name: getattr(_export_module(name), "LAYOUTS", {}) for name in exported_classes()}
    return {name: {**of_class, FOLDER: LAYOUT} for name, of_class in own.items()}


def described_layouts() -> str:
    """Return a text about all layouts, for the help of `vlightning export`."""
    parts = [f"Of every module: {FOLDER}: {LAYOUT}."]
    for name, known in layouts().items():
        others = "; ".join(f"{layout}: {what}" for layout, what in known.items() if layout != FOLDER)
        if others:
            parts.append(f"Of {name}, by default {next(iter(known))}: {others}.")
    return " ".join(parts)


def export(checkpoint: str, target: str, layout: str | None = None, tokenizer_of: TokenizerOf = read_tokenizer) -> str:
    """Write the model of a training checkpoint, and return a sentence about what was written.

    Args:
        checkpoint: A checkpoint file, the folder of a sharded one, or that of a run, for its best checkpoint.
        target: The file or folder to write.
        layout: One of those of the checkpoint's class; None takes its first.
        tokenizer_of: Reads the tokenizer of a checkpoint's data; methods do not import datamodules.

    Raises:
        UserError: If the checkpoint does not exist, is not of a module that can be exported, or not in this layout; or
            the target exists.
        RuntimeError: If the checkpoint cannot be read.
    """
    given = Path(checkpoint).expanduser()
    if not given.exists():
        raise UserError(
            f"Expected a .ckpt file of a training or a run's folder, got {checkpoint!r}, which does not exist: correct "
            "the path."
        )
    checkpoint = str(resolved(given))
    if not is_checkpoint(checkpoint) and Path(checkpoint).is_dir():
        raise UserError(
            f"Expected a .ckpt file, the folder of a sharded checkpoint or of a run, got {checkpoint!r}: correct the "
            "path."
        )
    check_free(Path(target))
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    known = layouts()
    name = _class_name(content, checkpoint, list(known))
    if layout not in (None, *known[name]):
        raise UserError(
            f"Expected {' or '.join(known[name])} as the layout of {name}, the class of {checkpoint!r}, got "
            f"{layout!r}: correct it."
        )
    layout, source = layout or next(iter(known[name])), f"the checkpoint {checkpoint!r}"
    if layout == FOLDER:
        return _write_folder(exported_classes()[name], content, Path(checkpoint), target, tokenizer_of)
    own = _export_module(name)
    assert own is not None  # it lists the layout
    write = own.export
    takes_tokenizer = "tokenizer_of" in inspect.signature(write).parameters
    return str(write(content, source, target, layout, **{"tokenizer_of": tokenizer_of} if takes_tokenizer else {}))


def _write_folder(
    cls: type[Method], content: Mapping[str, Any], checkpoint: Path, target: str, tokenizer_of: TokenizerOf
) -> str:
    module = rebuild(cls, content["hyper_parameters"], content["state_dict"], f"the checkpoint {str(checkpoint)!r}")
    module.find_networks(content)
    run = run_folder_of(checkpoint)
    preprocessing = recorded_preprocessing(content)
    module.adopt_preprocessing(preprocessing)
    module.adopt_retrieval_orders(content.get(ORDERS_KEY))
    order = module.retrieval_order()
    written = export_folder(module, content, run, target, tokenizer_of)
    return f"{written}; {described(preprocessing)}.{f' {order}' if order else ''}"


def _export_module(name: str) -> ModuleType | None:
    """Return the `export` module of a method with layouts of its own."""
    folder = "albef.downstream" if name in TASKS_OF_ALBEF else name.removesuffix("Module").lower()
    path = f"{lightning_modules.__name__}.{folder}"
    return import_module(f"{path}.export") if find_spec(path) and find_spec(f"{path}.export") else None


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
