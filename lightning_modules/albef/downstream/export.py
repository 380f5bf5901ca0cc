"""Export of checkpoints of the downstream tasks in the authors' layouts."""

from collections.abc import Mapping
from typing import Any

from ...base.pretrained import LAYOUT
from ...core.checkpoints import class_of, saved_settings
from ..export import write
from .assignment import TextAssignmentModule
from .entailment import EntailmentModule
from .nlvr import NLVR2Module
from .official import save_official
from .task import TaskMethod
from .vqa import VQAModule

LAYOUTS = {"vlightning": LAYOUT, "albef": "a .pth file in the authors' layout of the task"}
"""Description of each layout; the first, which `commands/export/layouts.py` writes, is the default."""
TASKS = {task.__name__: task for task in (EntailmentModule, NLVR2Module, TextAssignmentModule, VQAModule)}


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the model of a checkpoint.

    Args:
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: name of a new file.
        layout: "albef".

    Returns:
        A sentence for the log.

    Raises:
        UserError: If the target is a folder instead of a file, or the checkpoint does not fit its class.
    """
    task = TASKS[str(class_of(saved_settings(content)))]

    def save(module: TaskMethod, path: str) -> str:
        save_official(module, path)
        return f"layout of {task.__name__}"

    return write(task, save, content, source, target)
