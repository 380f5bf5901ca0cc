"""Export of checkpoints of the downstream tasks: the model and the tokenizer of its data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....common.errors import UserError
from ...base.checkpoints import class_of, saved_settings
from ...base.preprocessing import described, recorded_preprocessing
from ...base.pretrained import LAYOUT, TokenizerOf, export_folder, rebuild, without_tokenizer
from .assignment import TextAssignmentModule
from .entailment import EntailmentModule
from .nlvr import NLVR2Module
from .official import save_official
from .vqa import VQAModule

LAYOUTS = {"vlightning": LAYOUT, "albef": "a .pth file in the authors' layout of the task"}
"""Description of each layout; the first is the default."""
TASKS = {task.__name__: task for task in (EntailmentModule, NLVR2Module, TextAssignmentModule, VQAModule)}


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
        UserError: if the target is a folder instead of a file, or the checkpoint does not fit its class.
    """
    task = TASKS[str(class_of(saved_settings(content)))]
    module = rebuild(task, content["hyper_parameters"], content["state_dict"], source)
    preprocessing = recorded_preprocessing(content)
    module.adopt_preprocessing(preprocessing)
    if layout == "albef":
        if Path(target).is_dir():
            raise UserError(
                f"Expected the name of a new file, such as albef.pth, got the folder {target!r}: name a file."
            )
        save_official(module, target)
        return f"Wrote {target} in the authors' layout of {task.__name__}; {described(preprocessing)}."
    return f"{export_folder(module, content, target, tokenizer_of)}; {described(preprocessing)}."
