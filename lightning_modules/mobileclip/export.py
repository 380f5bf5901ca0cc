"""What `vlightning export` writes of a MobileCLIP checkpoint: the network that was evaluated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.preprocessing import recorded_preprocessing, said
from .models import model_config
from .pretrained import (
    Preprocessing,
    of_training,
    preprocessing_of_training,
    save_open_clip,
    save_vendor,
)
from .towers import export_towers

LAYOUTS = {
    "torch_export": "a folder with image.pt2 and text.pt2, fused, for torch.export.load",
    "onnx": "a folder with image.onnx and text.onnx, fused; needs the extra 'onnx'",
    "open_clip": "a folder that open_clip.create_model_and_transforms('local-dir:<folder>') loads",
    "vendor": "a .pt file as the vendor's code and model.weights load it, of MobileCLIP-S0, -S1, -S2 and -B",
}
"""What each layout is; the first is the default."""


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the network of a checkpoint: the moving average where there is one, else the student.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.
        target: what to write; there is nothing of that name, or an empty folder.
        layout: one of `LAYOUTS`.

    Returns:
        What was written.

    Raises:
        FileExistsError: if the target is a folder where a file is to be.
        ValueError: if the checkpoint does not fit its own arguments, or its model has no such layout.
        RuntimeError: if what was written gives other features than the network.
        OSError: if it cannot be written.
    """
    trained, kind = of_training(content, source)
    name, size = (content["hyper_parameters"][argument] for argument in ("model", "image_size"))
    look = preprocessing_of_training(content)
    if layout == "vendor":
        if Path(target).is_dir():
            raise FileExistsError(f"Found a folder {target!r}, expected the name of a new file, such as student.pt.")
        save_vendor(trained, target)
    elif layout == "open_clip":
        save_open_clip(trained, name, Preprocessing.of(look, source), target)
    else:
        size = size or model_config(name)["vision_cfg"]["image_size"]
        export_towers(trained, target, layout, size, preprocessing=look)  # type: ignore[arg-type]
    assumed = recorded_preprocessing(content) is None
    unsure = " (by the arguments of its module, since no datamodule of this package has evaluated it)" * assumed
    return f"Wrote {target} with the {kind} of {name} in the layout {layout!r}; {said(look)}{unsure}."
