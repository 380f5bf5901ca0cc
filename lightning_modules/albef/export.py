"""Export of ALBEF checkpoints: the model and the tokenizer of its data."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ..base.preprocessing import described, recorded_preprocessing
from ..base.pretrained import LAYOUT, TokenizerOf, export_folder, rebuild, without_tokenizer
from .module import ALBEFModule
from .official import save_official

LAYOUTS = {
    "vlightning": LAYOUT,
    "albef": "a .pth file in the authors' layout, that of pre-training if the model has a language-model head, else "
    "that of retrieval",
}
"""Description of each layout; the first is the default."""


def export(
    content: Mapping[str, Any],
    source: str,
    target: str,
    layout: str,
    tokenizer_of: TokenizerOf = without_tokenizer,
) -> str:
    """Write the model of a checkpoint.

    Args:
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: path to write to: a new name, or an empty folder.
        layout: one of `LAYOUTS`.
        tokenizer_of: reads the tokenizer for the folder; an argument, because methods do not import datamodules.

    Returns:
        A sentence for the log.

    Raises:
        UserError: if the target is a folder instead of a file, or the checkpoint does not fit `ALBEFModule`.
    """

    def save(module: ALBEFModule, path: str) -> str:
        save_official(module, path)
        return f"{'pre-training' if module.mlm else 'retrieval'} layout"

    return write(ALBEFModule, save, content, source, target, layout, tokenizer_of)


def write(
    kind: type[Any],
    save: Callable[[Any, str], str],
    content: Mapping[str, Any],
    source: str,
    target: str,
    layout: str,
    tokenizer_of: TokenizerOf,
) -> str:
    """Write the model of a checkpoint of a class; arguments, result and errors as of `export`.

    Args:
        kind: class of the module.
        save: writes a module in the authors' layout, and returns the name of the layout.
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: path to write to.
        layout: "albef" for that of the authors.
        tokenizer_of: reads the tokenizer for the folder.
    """
    module = rebuild(kind, content["hyper_parameters"], content["state_dict"], source)
    preprocessing = recorded_preprocessing(content)
    module.adopt_preprocessing(preprocessing)
    if layout != "albef":
        return f"{export_folder(module, content, target, tokenizer_of)}; {described(preprocessing)}."
    if Path(target).is_dir():
        raise UserError(f"Expected the name of a new file, such as albef.pth, got the folder {target!r}: name a file.")
    return f"Wrote {target} in the authors' {save(module, target)}; {described(preprocessing)}."
