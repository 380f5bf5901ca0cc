"""Students of earlier trainings, read from checkpoints."""

from collections.abc import Mapping
from typing import Any, Literal

from ...common.errors import UserError
from ...common.preprocessing import Preprocessing, training_record
from ..core.fitting import load_fitting, student_state
from ..core.settings import settings
from .descendant import PlainCLIP
from .network import LearngeneCLIP, SummedCLIP
from .settings import TextSettings, TowerSettings, VisionSettings, learngene_sizes
from .tleg import LinearCLIP

Student = Literal["MM-LG", "TLEG", "plain"]
NETWORKS: dict[str, type[SummedCLIP] | type[PlainCLIP]] = {
    "MM-LG": LearngeneCLIP,
    "TLEG": LinearCLIP,
    "plain": PlainCLIP,
}
"""Network of each kind of student."""


def rebuild_student(content: Mapping[str, Any], source: str) -> SummedCLIP | PlainCLIP:
    """Return the student of a checkpoint, in eval mode.

    Args:
        content: the checkpoint.
        source: description of the checkpoint for messages.

    Raises:
        UserError: If the checkpoint is of another class or version, or does not fit its own settings.
    """
    arguments = content["hyper_parameters"]
    missing = [name for name in ("student", "towers", "vision", "text") if name not in arguments]
    if missing:
        raise UserError(
            f"Expected the settings of MMLGModule in {source}, got none of {' and '.join(missing)}: give a checkpoint "
            "of that class, from this version of vlightning."
        )
    sizes = learngene_sizes(
        settings(TowerSettings, arguments["towers"]),
        settings(VisionSettings, arguments["vision"]),
        settings(TextSettings, arguments["text"]),
    )
    student = NETWORKS[arguments["student"]](sizes)
    load_fitting(student, student_state(content), f"the student from {source}")
    return student.eval()


def student_preprocessing(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return how evaluation prepared images in a training, as a record.

    Without a datamodule of this package, the module's settings are used.

    Args:
        content: the checkpoint.
    """
    vision = settings(VisionSettings, content["hyper_parameters"]["vision"])
    default = Preprocessing(vision.image_size, vision.image_mean, vision.image_std, "bicubic")
    return training_record(content, vision.image_size, lambda: default)
