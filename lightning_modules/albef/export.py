"""Export of ALBEF checkpoints: the model and the tokenizer of its data."""

from collections.abc import Mapping
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
    module = rebuild(ALBEFModule, content["hyper_parameters"], content["state_dict"], source)
    preprocessing = recorded_preprocessing(content)
    module.adopt_preprocessing(preprocessing)
    if layout == "albef":
        if Path(target).is_dir():
            raise UserError(
                f"Expected the name of a new file, such as albef.pth, got the folder {target!r}: name a file."
            )
        save_official(module, target)
        family = "pre-training" if module.mlm else "retrieval"
        return f"Wrote {target} in the authors' {family} layout; {described(preprocessing)}."
    return f"{export_folder(module, content, target, tokenizer_of)}; {described(preprocessing)}."
