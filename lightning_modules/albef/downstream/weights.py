"""Initial weights of the downstream tasks, from a trained ALBEF or from a model of the task, of either layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ....common.errors import UserError
from ...core.fitting import fill_tied, load_fitting
from ..official import QUEUES
from ..settings import TextSettings, VisionSettings
from ..weights import read_trained, resize_position_tables
from .official import task_name

ROOTS = ("student", "teacher")


def unchanged(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state as it is."""
    return state


@dataclass(frozen=True)
class TaskWeights:
    """How a task starts from the weights of another model.

    Args:
        new: prefixes of a network's tensors, such as "cls_head.", that may be missing and then start at random.
        unused: prefixes of the tensors of a trained ALBEF that the task does not have.
        convert: makes the task's networks from those of a trained ALBEF, under the names of this package, and returns
            a state of the task as it is.
    """

    new: tuple[str, ...]
    unused: tuple[str, ...] = ("vision_proj.", "text_proj.", "text_encoder.cls.")
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = unchanged


COMPLETE = TaskWeights(new=(), unused=())
"""Weights of the task itself, all of which must be there."""


def check_sources(vision: VisionSettings, text: TextSettings) -> None:
    """Check that no weights of an encoder are named, which a task would not load.

    Raises:
        UserError: If `vision.weights` or `text.weights` is given.
    """
    if (vision.weights, text.weights) != (None, None):
        raise UserError(
            f"Expected a trained ALBEF to start a task from, got vision.weights {vision.weights!r} and text.weights "
            f"{text.weights!r}: set model.weights, and the latter to null."
        )


def start(module: Any, source: str | None, task: TaskWeights) -> None:
    """Load initial weights into student and teacher of a task's module, and log what was loaded and what was not.

    Args:
        module: has the attributes `student`, `teacher` (None without distillation), `momentum` and `text`.
        source: checkpoint of the authors or of this package, or the folder of an export; None for a random start.
        task: what the task takes from it.

    Raises:
        UserError: If the source does not exist, is of another kind, or does not fit. Nothing is loaded then.
    """
    name = type(module).__name__
    if source is None:
        rank_zero_info(f"{name} starts at random: set model.weights to a trained ALBEF.")
        return
    state, description, name_in_source = read_trained(source)
    if name_in_source is not str:  # the authors' layout
        name_in_source = partial(task_name, depth=module.text.depth)
    rank_zero_info(f"{name} starts with {load_task(module, state, description, task, name_in_source)}.")


def load_task(
    module: Any,
    state: Mapping[str, Tensor],
    source: str,
    task: TaskWeights,
    name_in_source: Callable[[str], str] = str,
) -> str:
    """Load a state dict with the names of this package, strictly except for the tensors that `task` names.

    Without a teacher in the source, the teacher becomes a copy of the student (or see `TaskMomentumSettings.start`).
    Position tables are resized to the module's grid.

    Args:
        module: as in `start`.
        state: state dict of a trained ALBEF or of the task.
        source: description of the source, for messages.
        task: what the task takes from it.
        name_in_source: maps a name of this package to the source's, for messages.

    Returns:
        Description of what was loaded and what was not, for a log line.

    Raises:
        UserError: If the other tensors do not fit; the message lists the keys. Nothing is loaded then.
    """
    module_state = module.state_dict()
    notes: list[str] = []
    unused = tuple(f"{root}.{prefix}" for root in ROOTS for prefix in task.unused)
    loaded = {
        name: tensor
        for name, tensor in task.convert(state).items()
        if name in module_state or not name.startswith(("temperature", "itm_head.", *QUEUES, *unused))
    }
    if module.teacher is None:
        loaded = {name: tensor for name, tensor in loaded.items() if not name.startswith("teacher.")}
    random_teacher = {name: tensor for name, tensor in module_state.items() if name.startswith("teacher.")}
    has_teacher = any(name.startswith("teacher.") for name in loaded)

    random = [prefix for prefix in task.new if not any(name.startswith(f"student.{prefix}") for name in loaded)]
    if random:
        notes.append(f"{', '.join(prefix.rstrip('.') for prefix in random)} at random")
        names = tuple(f"student.{prefix}" for prefix in random)
        loaded |= {name: tensor for name, tensor in module_state.items() if name.startswith(names)}
    if module.teacher is not None:
        copied = tuple(task.new) if has_teacher else ("",)
        missing = [prefix for prefix in copied if not any(name.startswith(f"teacher.{prefix}") for name in loaded)]
        names = tuple(f"student.{prefix}" for prefix in missing)
        loaded |= {f"teacher.{name[8:]}": tensor for name, tensor in loaded.items() if name.startswith(names)}
        if not has_teacher:
            notes.append("the teacher as the student's copy")
    fill_tied(loaded, shared_names(module_state), source, "the model", name_in_source)
    resized = resize_position_tables(loaded, module_state)
    if resized:
        notes.append(resized)
    if module.teacher is not None and not has_teacher and module.momentum.start == "random":
        # The authors copy the random student before they load the weights, and average before the first pass.
        weight = 1 - module.momentum.momentum
        loaded |= {
            name: torch.lerp(tensor, loaded[f"student.{name[8:]}"], weight) for name, tensor in random_teacher.items()
        }
        notes[notes.index("the teacher as the student's copy")] = "the teacher at random"
    load_fitting(module, loaded, f"{type(module).__name__} from {source}", name_in_source)
    return ", ".join([source, *notes])


def shared_names(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the redundant name of each shared tensor, mapped to the other name.

    The halves of a doubled layer share projections, and a decoder's head shares the words and its bias.
    """
    redundant = {
        ".second.crossattention.self.key.": ".first.crossattention.self.key.",
        ".second.crossattention.self.value.": ".first.crossattention.self.value.",
        ".text_decoder.cls.predictions.decoder.weight": ".text_decoder.bert.embeddings.word_embeddings.weight",
        ".text_decoder.cls.predictions.decoder.bias": ".text_decoder.cls.predictions.bias",
    }
    return {name: name.replace(alias, other) for name in names for alias, other in redundant.items() if alias in name}


def without_shared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state without redundant names, which safetensors refuses."""
    shared = shared_names(state)
    return {name: tensor for name, tensor in state.items() if name not in shared}
