"""Export of ALBEF checkpoints in the authors' layout, in that of transformers, and as programs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...common.errors import UserError
from ...common.preprocessing import described, recorded_preprocessing
from ...common.tokenizers import saved_tokenizer
from ..base.encoder_programs import export_encoders
from ..base.exported import rebuild
from ..core.programs import LAYOUTS as PROGRAMS
from .official import save_official
from .transformers_layout import LAYOUT as TRANSFORMERS
from .transformers_layout import save_transformers

LAYOUTS = {
    "albef": "a .pth file in the authors' layout, that of pre-training if the model has a language-model head, else "
    "that of retrieval",
    "transformers": TRANSFORMERS,
    **PROGRAMS,
}
"""Description of each layout of `ALBEFModule`'s own."""


def write_layout(
    cls: type[Any],
    content: Mapping[str, Any],
    source: str,
    target: str,
    layout: str,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write the model of a checkpoint; arguments, result and errors are those of `ExportedModule.write_layout`."""
    if layout in PROGRAMS:
        return export_encoders(cls, content, source, target, layout, dtype)
    if layout == "transformers":
        module = rebuild(cls, content["hyper_parameters"], content["state_dict"], source)
        record = recorded_preprocessing(content)
        tokenizer, note = saved_tokenizer(content)
        save_transformers(module, record, target, tokenizer)
        return f"Wrote {target} with the encoders for transformers, {note}; {described(record)}."
    name = "pre-training layout" if content["hyper_parameters"].get("mlm", True) else "retrieval layout"
    return write_official(cls, name, content, source, target)


def write_official(cls: type[Any], name: str, content: Mapping[str, Any], source: str, target: str) -> str:
    """Write the model of a checkpoint in a layout of the authors, whose name the result has.

    The other arguments are those of `ExportedModule.write_layout`.

    Raises:
        UserError: If the target is a folder instead of a file, or the checkpoint does not fit the class.
    """
    module = rebuild(cls, content["hyper_parameters"], content["state_dict"], source)
    if Path(target).is_dir():
        raise UserError(f"Expected the name of a new file, such as albef.pth, got the folder {target!r}: name a file.")
    save_official(module, target)
    return f"Wrote {target} in the authors' {name}; {described(recorded_preprocessing(content))}."
