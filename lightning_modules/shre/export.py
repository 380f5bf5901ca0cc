"""Export of SHRe checkpoints as programs."""

from collections.abc import Mapping
from typing import Any

from ..base.encoder_programs import export_encoders
from ..base.pretrained import LAYOUT
from ..core.programs import LAYOUTS as PROGRAMS
from ..core.tokenizer_reader import TokenizerOf, read_tokenizer
from .module import SHReModule

LAYOUTS = {"vlightning": LAYOUT, **PROGRAMS}
"""Description of each layout; the first, which `commands/export/layouts.py` writes, is the default."""


def export(
    content: Mapping[str, Any], source: str, target: str, layout: str, tokenizer_of: TokenizerOf = read_tokenizer
) -> str:
    """Write the image encoder and the text encoder of a checkpoint, in the space `evaluation.features`.

    Args:
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: name of a new folder.
        layout: one of `LAYOUTS` but the first.
        tokenizer_of: reads the tokenizer of the data.

    Returns:
        A sentence for the log.

    Raises:
        UserError: If the checkpoint does not fit `SHReModule`, or the programs cannot be written.
    """
    return export_encoders(SHReModule, content, source, target, layout, tokenizer_of)
