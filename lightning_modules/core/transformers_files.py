"""Files that the `transformers` library reads: weights with their configuration, and the preprocessing of images.

Tensors have the names of published checkpoints, which every version of the library reads.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .clip_preprocessing import Preprocessing

_RESAMPLING = {"bilinear": 2, "bicubic": 3}  # of Pillow


def write_model(state: Mapping[str, Tensor], config: Any, architecture: str, folder: Path) -> None:
    """Write `model.safetensors` and `config.json`.

    Args:
        state: tensors by name.
        config: configuration of the library.
        architecture: name of the library's class.
        folder: an existing folder.
    """
    config.architectures = [architecture]
    config.save_pretrained(folder)
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


@contextlib.contextmanager
def without_progress() -> Iterator[None]:
    """Load models within the context without the library's progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def write_preprocessing(preprocessing: Preprocessing, folder: Path) -> None:
    """Write `preprocessor_config.json`, which `AutoImageProcessor` reads."""
    side, size = preprocessing.resize or preprocessing.image_size, preprocessing.image_size
    crops = preprocessing.resize_mode == "shortest"
    record = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side} if crops else {"height": side, "width": side},
        "resample": _RESAMPLING[preprocessing.interpolation],
        "do_center_crop": crops,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
