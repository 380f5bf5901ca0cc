"""The student of an earlier training: for another one to start from, and for other code."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...callbacks import Learngene, LearngeneSizes, expand_learngene
from ..base.fitting import load_fitting, student_state
from ..base.preprocessing import recorded_preprocessing
from ..networks.clip_preprocessing import Preprocessing
from ..networks.open_clip_folder import write_open_clip
from .descendant import PlainCLIP, clip_config
from .network import LearngeneCLIP, LinearCLIP, SummedCLIP

Student = Literal["MM-LG", "TLEG", "plain"]
NETWORKS: dict[str, type[SummedCLIP] | type[PlainCLIP]] = {
    "MM-LG": LearngeneCLIP,
    "TLEG": LinearCLIP,
    "plain": PlainCLIP,
}
"""What each kind of student is."""


def rebuild_student(content: Mapping[str, Any], source: str) -> SummedCLIP | PlainCLIP:
    """The student of a checkpoint, in eval mode.

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
    return student.eval()


def as_clip(student: SummedCLIP | PlainCLIP) -> PlainCLIP:
    """An auxiliary as the ordinary CLIP of full depth that it computes; an ordinary one as it is."""
    if isinstance(student, PlainCLIP):
        return student
    clip = PlainCLIP(student.sizes)
    state = {name: tensor.detach() for name, tensor in student.state_dict().items()}
    expand_learngene(Learngene(state, student.sizes, method=student.method), clip)
    return clip.eval()


def preprocessing_of_training(content: Mapping[str, Any]) -> dict[str, Any]:
    """What evaluation did to an image in a training, in the words of `recorded_preprocessing`.

    Where the datamodule is not one of this package the module's arguments say it.

    Args:
        content: its checkpoint.
    """
    arguments = content["hyper_parameters"]
    size, mean, std = (arguments[f"image_{part}"] for part in ("size", "mean", "std"))
    recorded = recorded_preprocessing(content)
    if recorded is None:
        return dataclasses.asdict(Preprocessing(size, mean, std, "bicubic"))
    return recorded if "transform" in recorded else recorded | {"image_size": size}


def save_student(student: SummedCLIP | PlainCLIP, preprocessing: Preprocessing, folder: str | Path) -> None:
    """Write a folder that open_clip loads, of an auxiliary as the CLIP of full depth that it computes.

    Args:
        student: what to write.
        preprocessing: what it expects to be done with an image.
        folder: a new or an empty one.

    Raises:
        ValueError: if open_clip's configuration has no words for that.
        FileExistsError: if there is something of that name already.
        OSError: if it cannot be written.
    """
    write_open_clip(as_clip(student), clip_config(student.sizes), preprocessing, folder)
