"""Strict loading: all weights of a network, or none; and tied weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from .checkpoints import is_folder, read_folder

_STUDENT = "student."


def load_fitting(
    module: nn.Module, state: Mapping[str, Tensor], what: str, name_of: Callable[[str], str] = str
) -> None:
    """Load a state dict whose keys and shapes all match.

    Args:
        module: network to load into.
        state: complete state dict.
        what: the network and its source, for the message.
        name_of: returns the name under which a key is reported.

    Raises:
        UserError: If a key or shape does not match; the message lists them. Nothing is loaded then.
    """
    expected = module.state_dict()
    missing = expected.keys() - state.keys()
    unexpected = state.keys() - expected.keys()
    misshapen = [
        f"{name_of(key)} {tuple(state[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in expected.keys() & state.keys()
        if expected[key].shape != state[key].shape
    ]
    if missing or unexpected or misshapen:
        raise UserError(
            f"Expected the tensors of {what}, got missing {_some(map(name_of, missing))}, unknown "
            f"{_some(map(name_of, unexpected))}, of another shape {_some(misshapen)}: set the model's sizes to those "
            "of the source."
        )
    module.load_state_dict(state)


def fill_tied(
    state: dict[str, Tensor], tied: Mapping[str, str], source: str, model: str, name_of: Callable[[str], str] = str
) -> None:
    """Give a state dict the second names of tied tensors, and check that both names have equal values.

    Args:
        state: state dict, with tied tensors under one name or both.
        tied: second name of each tied tensor, mapped to the first.
        source: description of the source, for messages.
        model: the network in which they are one tensor, for messages.
        name_of: returns the name under which a key is reported.

    Raises:
        UserError: If values differ.
    """
    for second, first in tied.items():
        if first in state and not torch.equal(state.setdefault(second, state[first]), state[first]):
            raise UserError(
                f"Expected equal values of {name_of(first)} and {name_of(second)}, one tensor in {model}, in {source}, "
                "got different values: give another checkpoint."
            )


def load_student(student: nn.Module, source: str, trained_by: str) -> str:
    """Load the network `student` of a module from a checkpoint of an earlier training.

    Args:
        student: network to load into.
        source: checkpoint, a file or the folder of a sharded one, or the folder of an export.
        trained_by: class of the module, for messages.

    Returns:
        A log line.

    Raises:
        UserError: If there is no such checkpoint, or it has no student or a different one. Nothing is loaded then.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(
            f"Expected a checkpoint to start from, got no file or folder {source!r}: correct model.weights."
        )
    exported = is_folder(path)
    state = student_state(
        {"state_dict": read_folder(path)[1]} if exported else AtomicCheckpointIO().load_checkpoint(path)
    )
    if not state:
        raise UserError(
            f"Expected a checkpoint of {trained_by}, got {source!r} without a student: correct model.weights."
        )
    load_fitting(student, state, f"the student from {source!r}")
    return f"The student starts from {source!r}."


def student_state(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of the network `student` in a checkpoint."""
    state = content.get("state_dict", {})
    return {name.removeprefix(_STUDENT): tensor for name, tensor in state.items() if name.startswith(_STUDENT)}


def _some(items: Iterable[str]) -> str:
    names = sorted(set(items))
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def misfits(missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]) -> list[str]:
    """Return a clause for each way in which weights do not fit a network: the number of tensors, and the first.

    Args:
        missing: names of tensors of the network that the weights lack.
        unexpected: names of tensors that the network lacks.
        wrong: names of tensors of another shape.
    """
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": wrong}
    return [
        f"{len(names)} {kind} ({names[0]}{', ...' if len(names) > 1 else ''})" for kind, names in kinds.items() if names
    ]
