"""Files and folders of a pair of towers in the layouts of the vendor and of open_clip."""

from pathlib import Path
from typing import Any

import torch
from open_clip import CustomTextCLIP

from ....callbacks import AtomicCheckpointIO
from ....common.errors import UserError
from ....common.files import check_free
from ...core.clip_preprocessing import Preprocessing
from ..open_clip_folder import check_expressible, write_open_clip
from .models import has_vendor_stem, model_config, preset_of
from .shapes import Model, resolved
from .vendor_layout import is_vit, to_vendor


def save_vendor(model: CustomTextCLIP, path: str | Path) -> None:
    """Write a `.pt` file that the vendor's code loads.

    Args:
        model: MobileCLIP-S0, -S1, -S2 or -B, not reparameterized.
        path: the file.

    Raises:
        UserError: If the vendor's code has no such model.
        OSError: If the file cannot be written; an existing file is then unchanged.
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
        UserError: If open_clip has no such model, or the folder exists and is not empty.
        OSError: If it cannot be written.
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
        open_clips = CustomTextCLIP(**{key: value for key, value in config.items() if key != "custom_text"})
    made, found = _shapes(open_clips), _shapes(model)
    differing = sorted(key for key in made.keys() | found.keys() if made.get(key) != found.get(key))
    if differing:
        raise UserError(
            f"Expected the {name} that open_clip builds, not reparameterized and a ViT of timm in its own image size, "
            f"got {len(differing)} other weights ({differing[0]}, ...): write another layout."
        )
    return config


def _shapes(model: CustomTextCLIP) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in model.state_dict().items() if not key.startswith("logit_")}
