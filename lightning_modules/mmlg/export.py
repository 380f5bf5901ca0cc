"""What `vlightning export` writes of a checkpoint of MM-LG's: an ordinary CLIP, or a learngene."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...callbacks import Learngene, save_learngene
from ..base.preprocessing import said
from ..mobileclip.pretrained import Preprocessing
from .pretrained import preprocessing_of_training, rebuild_student, save_student

LAYOUTS = {
    "open_clip": "a folder that open_clip.create_model_and_transforms('local-dir:<folder>') loads, and MMLGModule",
    "learngene": "a file that LearngeneExpansionCallback takes; of an ordinary CLIP that of He-LG",
}
"""What each layout is; the first is the default."""


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the student of a checkpoint; an auxiliary as the CLIP of full depth that it computes.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.
        target: what to write; there is nothing of that name, or an empty folder.
        layout: one of `LAYOUTS`.

    Returns:
        What was written.

    Raises:
        FileExistsError: if the target is a folder where a file is to be.
        ValueError: if the checkpoint does not fit its own arguments.
        OSError: if it cannot be written.
    """
    student = rebuild_student(content, source)
    look = preprocessing_of_training(content)
    if layout == "open_clip":
        save_student(student, Preprocessing.of(look, source), target)
        return f"Wrote {target} with the CLIP of {student.sizes.layers} layers a tower, for open_clip; {said(look)}."
    if Path(target).is_dir():
        raise FileExistsError(
            f"Found a folder {target!r}, expected the name of a new file, such as learngene.safetensors."
        )
    tensors = student.learngene_tensors(dict(student.state_dict()))
    step = content.get("global_step")
    teacher, method = content.get("teacher"), student.method
    learngene = Learngene(tensors, student.sizes, teacher, step=step, method=method, preprocessing=look)
    save_learngene(learngene, target)
    return f"Wrote {target} with the learngene of {method}; {said(look)}."
