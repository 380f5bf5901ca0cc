"""The student of an earlier training, for another one to start from."""

from pathlib import Path

from torch import nn

from ...callbacks import AtomicCheckpointIO
from ..fitting import load_fitting

_STUDENT = "student."


def load_student(student: nn.Module, source: str) -> str:
    """Fill a student from a checkpoint of `MMLGModule`.

    Args:
        student: what to fill.
        source: the checkpoint, a file or a sharded one's folder.

    Returns:
        What was done, for a log line.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if it has no student, or one of another kind or size. Nothing is loaded then.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"Found no checkpoint {source!r} to start from: correct model.weights.")
    state = AtomicCheckpointIO().load_checkpoint(path).get("state_dict", {})
    own = {name.removeprefix(_STUDENT): tensor for name, tensor in state.items() if name.startswith(_STUDENT)}
    if not own:
        raise ValueError(f"Found no student in {source!r}, expected a checkpoint of MMLGModule: correct model.weights.")
    load_fitting(student, own, f"the student from {source!r}")
    return f"The student starts from {source!r}."
