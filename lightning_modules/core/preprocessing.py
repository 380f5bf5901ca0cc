"""Image preprocessing as plain data, for checkpoints, exports and messages.

A record has the keys of the datamodules' evaluation transforms: `image_size`, `mean`, `std`, `interpolation`,
`resize_mode` ("shortest" or "squash") and `resize`, the size before the crop if it is larger. For a transform that does
not describe itself, a record has only its class, as `transform`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ...callbacks import AtomicCheckpointIO
from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from .folder import is_folder, read_folder


def recorded_preprocessing(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the evaluation preprocessing of a checkpoint's training; None if the checkpoint does not contain it.

    Args:
        content: the checkpoint. Lightning stores the datamodule's state under the name of its class.
    """
    states = (state for name, state in content.items() if name != "state_dict" and isinstance(state, Mapping))
    found = (state.get("preprocessing") for state in states)
    return next((dict(record) for record in found if isinstance(record, Mapping)), None)


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint of a training, a file or the folder of a sharded checkpoint."""
    file = Path(path).expanduser()
    return (file / METADATA).is_file() or (file.suffix == ".ckpt" and file.is_file())


def preprocessing_of_checkpoint(path: str | Path) -> dict[str, Any] | None:
    """Return the evaluation preprocessing of a training; None if it is not recorded.

    Args:
        path: checkpoint, or the folder of an export. A missing file is reported when the weights are loaded.
    """
    folder = Path(path).expanduser()
    if is_folder(folder):
        recorded: dict[str, Any] | None = read_folder(folder)[0].get("preprocessing")
        return recorded
    if not is_checkpoint(path):
        return None
    return recorded_preprocessing(AtomicCheckpointIO().load_checkpoint(Path(path).expanduser()))


def has_pixels(record: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a record describes the preparation of pixels."""
    return record is not None and "mean" in record


def described(record: Mapping[str, Any] | None) -> str:
    """Describe a record as the end of a sentence about a model."""
    if record is None or ("mean" not in record and "transform" not in record):
        return "the preprocessing of its images is unknown"
    if "transform" in record:
        return f"the preprocessing of its images, {record['transform']}, cannot be recorded"
    size, resize = record["image_size"], record.get("resize") or record["image_size"]
    ways = {
        "shortest": f"the shorter side resized to {resize}, center crop of {size} x {size} pixels",
        "squash": f"both sides resized to {resize}",
    }
    mean, std = (", ".join(f"{value:.4g}" for value in record[name]) for name in ("mean", "std"))
    return (
        f"preprocessing of its images: {ways[record['resize_mode']]}, {record['interpolation']}, normalized with "
        f"mean ({mean}) and standard deviation ({std}) on the 0-1 scale"
    )
