"""Export of checkpoints: an ordinary CLIP for open_clip or transformers, or a learngene."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch

from ...callbacks.learngene.file import Learngene, save_learngene
from ...common.errors import UserError
from ...common.preprocessing import Preprocessing, described
from ..base.exported import rebuild
from ..core.programs import LAYOUTS as PROGRAMS
from ..networks.clip.files import write_open_clip
from ..networks.clip.programs import export_towers
from ..networks.clip.transformers_layout import LAYOUT as TRANSFORMERS
from ..networks.clip.transformers_layout import save_transformers
from .students import as_clip, clip_config, student_preprocessing

LAYOUTS = {
    "open_clip": "a folder that open_clip.create_model_and_transforms('local-dir:<folder>') loads, and MMLGModule",
    "transformers": TRANSFORMERS,
    **PROGRAMS,
    "learngene": "a file for LearngeneExpansionCallback; of an ordinary CLIP the learngene of He-LG",
}
"""Description of each layout; the first is the default."""


def export(
    cls: type[Any],
    content: Mapping[str, Any],
    source: str,
    target: str,
    layout: str,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write the student of a checkpoint; an auxiliary as the CLIP of full depth that it computes.

    Arguments, result and errors are those of `ExportedModule.write_layout`, for the class `MMLGModule`.
    """
    student = rebuild(cls, content["hyper_parameters"], content["state_dict"], source).student.float().eval()
    record = student_preprocessing(content)
    if layout == "open_clip":
        write_open_clip(as_clip(student), clip_config(student.sizes), Preprocessing.from_dict(record, source), target)
        layers = student.sizes.layers
        return f"Wrote {target} with the CLIP of {layers} layers a tower, for open_clip; {described(record)}."
    if layout in PROGRAMS:
        plain = open_clip.CLIP(**clip_config(student.sizes), nonscalar_logit_scale=True)
        plain.load_state_dict(as_clip(student).state_dict())
        size = student.sizes.image_size
        options: Any = {"preprocessing": record, "dtype": dtype}
        export_towers(plain.eval(), target, layout, size, **options)
        return f"Wrote {target} with the towers in the layout {layout!r}; {described(record)}."
    if layout == "transformers":
        save_transformers(as_clip(student), Preprocessing.from_dict(record, source), target)
        return f"Wrote {target} with the CLIP of {student.sizes.layers} layers a tower; {described(record)}."
    if Path(target).is_dir():
        raise UserError(
            f"Expected the name of a new file, such as learngene.safetensors, got the folder {target!r}: name a file."
        )
    tensors = student.learngene_tensors(dict(student.state_dict()))
    step, teacher, method = content.get("global_step"), content.get("teacher"), student.method
    save_learngene(Learngene(tensors, student.sizes, method, teacher, step=step, preprocessing=record), target)
    return f"Wrote {target} with the learngene of {method}; {described(record)}."
