"""Weights that a network is filled with whole, or not at all."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...callbacks import AtomicCheckpointIO

_STUDENT = "student."


def load_fitting(module: nn.Module, state: Mapping[str, Tensor], what: str, say: Callable[[str], str] = str) -> None:
    """Load a state dict of which every key and every shape fits.

    Args:
        module: what to fill.
        state: its whole state.
        what: what is filled and where it is from, for the message.
        say: gives the name under which a key is reported.

    Raises:
        ValueError: if something does not fit; the sentence lists it. Nothing is loaded then.
    """
    own = module.state_dict()
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    misshapen = [
        f"{say(key)} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own.keys() & state.keys()
        if own[key].shape != state[key].shape
    ]
    if missing or unexpected or misshapen:
        raise ValueError(
            f"Cannot initialise {what}: missing {_some(map(say, missing))}, unknown {_some(map(say, unexpected))}, "
            f"of another shape {_some(misshapen)}; set the model's sizes to those of the source."
        )
    module.load_state_dict(state)


def load_student(student: nn.Module, source: str, trained_by: str) -> str:
    """Fill a module's network `student` from the checkpoint of an earlier training.

    Args:
        student: what to fill.
        source: the checkpoint, a file or a sharded one's folder.
        trained_by: class of the module, for messages.

    Returns:
        What was done, for a log line.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if it has no student, or one of another kind or size. Nothing is loaded then.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"Found no checkpoint {source!r} to start from: correct model.weights.")
    own = student_state(AtomicCheckpointIO().load_checkpoint(path))
    if not own:
        raise ValueError(
            f"Found no student in {source!r}, expected a checkpoint of {trained_by}: correct model.weights."
        )
    load_fitting(student, own, f"the student from {source!r}")
    return f"The student starts from {source!r}."


def student_state(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The part of a checkpoint that is the network `student` of its module, under its own names."""
    state = content.get("state_dict", {})
    return {name.removeprefix(_STUDENT): tensor for name, tensor in state.items() if name.startswith(_STUDENT)}


def _some(items: Iterable[str]) -> str:
    names = sorted(set(items))
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
