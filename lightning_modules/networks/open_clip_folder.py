"""Folders with a model that `open_clip.create_model_and_transforms("local-dir:<folder>")` loads."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from ...common.errors import UserError
from ...common.files import check_free, replacing, writing
from ..core.clip_preprocessing import Preprocessing

CONFIG_NAME, WEIGHTS_NAME = "open_clip_config.json", "open_clip_model.safetensors"
"""File names that open_clip looks for."""


def write_open_clip(
    model: nn.Module, config: Mapping[str, Any], preprocessing: Preprocessing, folder: str | Path
) -> None:
    """Write the folder atomically.

    Args:
        model: the network.
        config: the configuration that open_clip builds it from.
        preprocessing: its image preprocessing.
        folder: a new or an empty folder.

    Raises:
        UserError: If open_clip's configuration cannot express the preprocessing, or the folder exists and is not empty.
        OSError: If it cannot be written.
    """
    check_expressible(preprocessing)
    target = Path(folder).expanduser().absolute()
    check_free(target)
    preprocess = dataclasses.asdict(preprocessing)
    preprocess["size"] = preprocess.pop("image_size")
    del preprocess["resize"]
    # open_clip's scale and bias are of shape [].
    state = {
        key: tensor.reshape(()) if key in ("logit_scale", "logit_bias") else tensor.contiguous()
        for key, tensor in model.state_dict().items()
    }
    with replacing(target) as staged, writing(target):
        staged.mkdir()
        save_file(state, staged / WEIGHTS_NAME, {"format": "pt"})
        text = json.dumps({"model_cfg": dict(config), "preprocess_cfg": preprocess}, indent=2)
        (staged / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def check_expressible(preprocessing: Preprocessing) -> None:
    """Check that open_clip's configuration can express the preprocessing.

    Raises:
        UserError: If it resizes to one size and crops to another.
    """
    if preprocessing.resize not in (None, preprocessing.image_size):
        raise UserError(
            f"Expected images resized to the size of the crop, which is all that open_clip's configuration can "
            f"express, got a resize to {preprocessing.resize} pixels before a crop to {preprocessing.image_size}: "
            "evaluate with CLIPEvalTransform as data.eval_transform, or export in another layout."
        )
