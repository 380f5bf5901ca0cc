"""The student of an earlier training: for another one to start from, and for other code."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...callbacks import Learngene, LearngeneSizes, expand_learngene
from ..fitting import load_fitting, student_state
from ..mobileclip.pretrained import Preprocessing, write_open_clip
from .descendant import PlainCLIP, clip_config
from .network import LearngeneCLIP, LinearCLIP, SummedCLIP

Student = Literal["MM-LG", "TLEG", "plain"]
NETWORKS: dict[str, type[SummedCLIP] | type[PlainCLIP]] = {
    "MM-LG": LearngeneCLIP,
    "TLEG": LinearCLIP,
    "plain": PlainCLIP,
}
"""What each kind of student is."""


def rebuild_student(content: Mapping[str, Any], source: str) -> tuple[SummedCLIP | PlainCLIP, Mapping[str, Any]]:
    """The student of a checkpoint, in eval mode, and the arguments of its module.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.

    Raises:
        ValueError: if it is of another class or version, or does not fit its own arguments.
    """
    arguments = content["hyper_parameters"]
    names = [field.name for field in dataclasses.fields(LearngeneSizes)]
    missing = [name for name in (*names, "student", "image_mean", "image_std") if name not in arguments]
    if missing:
        raise ValueError(
            f"Found no {' and no '.join(missing)} among the hyper_parameters of {source}, expected those of "
            "MMLGModule: it is of another class, or of another version of vlightning."
        )
    student = NETWORKS[arguments["student"]](LearngeneSizes(**{name: arguments[name] for name in names}))
    load_fitting(student, student_state(content), f"the student from {source}")
    return student.eval(), arguments


def as_clip(student: SummedCLIP | PlainCLIP) -> PlainCLIP:
    """An auxiliary as the ordinary CLIP of full depth that it computes; an ordinary one as it is."""
    if isinstance(student, PlainCLIP):
        return student
    clip = PlainCLIP(student.sizes)
    state = {name: tensor.detach() for name, tensor in student.state_dict().items()}
    expand_learngene(Learngene(state, student.sizes, method=student.method), clip)
    return clip.eval()


def preprocessing_of(student: SummedCLIP | PlainCLIP, arguments: Mapping[str, Any]) -> Preprocessing:
    """What a student expects to be done with a picture, by its sizes and the arguments of its module."""
    return Preprocessing(student.sizes.image_size, arguments["image_mean"], arguments["image_std"], "bicubic")


def save_student(student: SummedCLIP | PlainCLIP, arguments: Mapping[str, Any], folder: str | Path) -> None:
    """Write a folder that open_clip loads, of an auxiliary as the CLIP of full depth that it computes.

    Args:
        student: what to write.
        arguments: of its module.
        folder: a new or an empty one.

    Raises:
        FileExistsError: if there is something of that name already.
        OSError: if it cannot be written.
    """
    write_open_clip(as_clip(student), clip_config(student.sizes), preprocessing_of(student, arguments), folder)
