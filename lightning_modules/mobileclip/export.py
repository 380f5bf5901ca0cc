"""Export of a MobileCLIP checkpoint: the evaluated network, in several layouts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip import CustomTextCLIP

from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ...common.files import check_free
from ..base.preprocessing import described, recorded_preprocessing
from ..networks.clip_preprocessing import Preprocessing
from ..networks.open_clip_folder import check_expressible, write_open_clip
from .models import has_vendor_stem, model_config, preset_of
from .preprocessing import preprocessing_of_training
from .programs import export_towers
from .shapes import Model, resolved
from .trained import network_of_training
from .vendor_layout import is_vit, to_vendor

LAYOUTS = {
    "torch_export": "a folder with image.pt2 and text.pt2, reparameterized, for torch.export.load",
    "onnx": "a folder with image.onnx and text.onnx, reparameterized; needs the extra 'onnx'",
    "open_clip": "a folder that open_clip.create_model_and_transforms('local-dir:<folder>') loads",
    "vendor": "a .pt file as the vendor's code and model.weights load it, of MobileCLIP-S0, -S1, -S2 and -B",
}
"""Description of each layout; the first is the default."""


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the network of a checkpoint: the moving average if there is one, else the student.

    Args:
        content: the checkpoint.
        source: where the checkpoint is from, for messages.
        target: a new file or folder, or an empty folder.
        layout: one of `LAYOUTS`.

    Returns:
        A sentence about what was written.

    Raises:
        UserError: if the checkpoint does not fit its own arguments, the model has no such layout, the target is a
            folder instead of a file, or the exported features differ from the network's.
        OSError: if the target cannot be written.
    """
    network, kind = network_of_training(content, source)
    arguments = content["hyper_parameters"]
    name, size = resolved(arguments["model"]), arguments["vision"]["image_size"]
    record = preprocessing_of_training(content)
    if layout == "vendor":
        if Path(target).is_dir():
            raise UserError(f"Expected the name of a new file, such as student.pt, got the folder {target!r}.")
        save_vendor(network, target)
    elif layout == "open_clip":
        save_open_clip(network, name, Preprocessing.of(record, source), target)
    else:
        size = size or model_config(name)["vision_cfg"]["image_size"]
        export_towers(network, target, layout, size, preprocessing=record)  # type: ignore[arg-type]
    assumed = recorded_preprocessing(content) is None
    unsure = " (by the arguments of its module, since no datamodule of this package has evaluated it)" * assumed
    return f"Wrote {target} with the {kind} of {name} in the layout {layout!r}; {described(record)}{unsure}."


def save_vendor(model: CustomTextCLIP, path: str | Path) -> None:
    """Write a `.pt` file that the vendor's code loads.

    Args:
        model: MobileCLIP-S0, -S1, -S2 or -B, not reparameterized.
        path: the file.

    Raises:
        UserError: if the vendor's code has no such model.
        OSError: if the file cannot be written; an existing file is then unchanged.
    """
    state = model.state_dict()
    if is_vit(state) and not has_vendor_stem(model):
        raise UserError(
            "Expected a ViT with the vendor's stem, got timm's, which the vendor's code would run with another stem: "
            "write the layout of open_clip."
        )
    AtomicCheckpointIO().save_checkpoint(to_vendor(state), Path(path).expanduser())


def save_open_clip(model: CustomTextCLIP, name: Model, preprocessing: Preprocessing, folder: str | Path) -> None:
    """Write a folder that `open_clip.create_model_and_transforms("local-dir:<folder>")` loads, atomically.

    Args:
        model: the network, not reparameterized.
        name: the name that it was built by.
        preprocessing: its image preprocessing.
        folder: a new or an empty folder.

    Raises:
        UserError: if open_clip has no such model, or the folder exists and is not empty.
        OSError: if it cannot be written.
    """
    check_expressible(preprocessing)
    check_free(Path(folder).expanduser().absolute())
    write_open_clip(model, _open_clip_config(model, name, preprocessing.image_size), preprocessing, folder)


def _open_clip_config(model: CustomTextCLIP, name: Model, image_size: int) -> dict[str, Any]:
    """Return the configuration that open_clip builds this very model from."""
    name = resolved(name)
    preset = preset_of(name)
    mixers = preset is not None and preset.mixers
    if mixers or has_vendor_stem(model):
        part = "the mixers of its text tower" if mixers else "the vendor's stem"
        raise UserError(
            f"Expected a model that open_clip can build, got {name} with {part}: write the layout 'vendor'."
        )
    config = model_config(name, image_size, model.context_length)
    with torch.device("meta"):
        theirs = CustomTextCLIP(**{key: value for key, value in config.items() if key != "custom_text"})
    made, found = _shapes(theirs), _shapes(model)
    differing = sorted(key for key in made.keys() | found.keys() if made.get(key) != found.get(key))
    if differing:
        raise UserError(
            f"Expected the {name} that open_clip builds, not reparameterized and a ViT of timm in its own image size, "
            f"got {len(differing)} other weights ({differing[0]}, ...): write another layout."
        )
    return config


def _shapes(model: CustomTextCLIP) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in model.state_dict().items() if not key.startswith("logit_")}
