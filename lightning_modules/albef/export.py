"""Export of ALBEF checkpoints in the authors' layout and in that of transformers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ...common.preprocessing import described, recorded_preprocessing
from ..base.encoder_programs import export_encoders
from ..base.pretrained import LAYOUT, rebuild
from ..core.programs import LAYOUTS as PROGRAMS
from ..core.tokenizer_reader import TokenizerOf, read_tokenizer
from .module import ALBEFModule
from .official import save_official
from .transformers_layout import LAYOUT as TRANSFORMERS
from .transformers_layout import save_transformers

LAYOUTS = {
    "vlightning": LAYOUT,
    "albef": "a .pth file in the authors' layout, that of pre-training if the model has a language-model head, else "
    "that of retrieval",
    "transformers": TRANSFORMERS,
    **PROGRAMS,
}
"""Description of each layout; the first, which `commands/export/layouts.py` writes, is the default."""


def export(
    content: Mapping[str, Any], source: str, target: str, layout: str, tokenizer_of: TokenizerOf = read_tokenizer
) -> str:
    """Write the model of a checkpoint.

    Args:
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: name of a new file for "albef", else of a new folder.
        layout: one of `LAYOUTS`.
        tokenizer_of: reads the tokenizer of the data; an argument, because methods do not import datamodules.

    Returns:
        A sentence for the log.

    Raises:
        UserError: If the target is a folder instead of a file, or the checkpoint does not fit `ALBEFModule`.
    """
    if layout in PROGRAMS:
        return export_encoders(ALBEFModule, content, source, target, layout, tokenizer_of)
    if layout == "transformers":
        module = rebuild(ALBEFModule, content["hyper_parameters"], content["state_dict"], source)
        record = recorded_preprocessing(content)
        tokenizer, note = tokenizer_of(content)
        save_transformers(module, record, target, tokenizer)
        return f"Wrote {target} with the encoders for transformers, {note}; {described(record)}."

    def save(module: ALBEFModule, path: str) -> str:
        save_official(module, path)
        return f"{'pre-training' if module.mlm else 'retrieval'} layout"

    return write(ALBEFModule, save, content, source, target)


def write(
    kind: type[Any], save: Callable[[Any, str], str], content: Mapping[str, Any], source: str, target: str
) -> str:
    """Write the model of a checkpoint of a class; the other arguments, result and errors as of `export`.

    Args:
        kind: class of the module.
        save: writes a module in the authors' layout, and returns the name of the layout.
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: name of a new file.
    """
    module = rebuild(kind, content["hyper_parameters"], content["state_dict"], source)
    if Path(target).is_dir():
        raise UserError(f"Expected the name of a new file, such as albef.pth, got the folder {target!r}: name a file.")
    return f"Wrote {target} in the authors' {save(module, target)}; {described(recorded_preprocessing(content))}."
