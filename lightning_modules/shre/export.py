"""Export of SHRe checkpoints: the student with its logit scales, and the tokenizer of its data."""

from collections.abc import Mapping
from typing import Any

from ..base.preprocessing import described, recorded_preprocessing
from ..base.pretrained import LAYOUT, TokenizerOf, export_folder, rebuild, without_tokenizer
from .module import SHReModule

LAYOUTS = {"vlightning": LAYOUT}
"""Description of each layout."""


def export(
    content: Mapping[str, Any], source: str, target: str, layout: str, tokenizer_of: TokenizerOf = without_tokenizer
) -> str:
    """Write the model of a checkpoint; the teacher's file is not needed.

    Args:
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: new or empty folder.
        layout: the only one of `LAYOUTS`.
        tokenizer_of: reads the tokenizer for the folder; an argument, because methods do not import datamodules.

    Returns:
        A sentence for the log.

    Raises:
        UserError: if the checkpoint does not fit `SHReModule`.
    """
    module = rebuild(SHReModule, content["hyper_parameters"], content["state_dict"], source)
    preprocessing = recorded_preprocessing(content)
    module.adopt_preprocessing(preprocessing)
    return f"{export_folder(module, content, target, tokenizer_of)}; {described(preprocessing)}."
