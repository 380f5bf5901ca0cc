"""Preprocessing of images as plain data: in checkpoints, exports and messages.

The words are those of the datamodules' transforms for evaluation: `image_size`, `mean`, `std`, `interpolation`,
`resize_mode` ("shortest" or "squash") and `resize`, the size before the crop where that is larger. Of a transform that
does not say what it does there is its class, as `transform`, alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...callbacks import AtomicCheckpointIO
from ...callbacks.checkpoints.sharded_checkpoint import METADATA


def recorded_preprocessing(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the preprocessing that a checkpoint's training evaluated with; None where the checkpoint does not hold it.

    Args:
        content: the checkpoint. Lightning keeps the datamodule's state under the name of its class.
    """
    states = (state for name, state in content.items() if name != "state_dict" and isinstance(state, Mapping))
    found = (state.get("preprocessing") for state in states)
    return next((dict(record) for record in found if isinstance(record, Mapping)), None)


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint of a training: a file, or the folder of a sharded one."""
    file = Path(path).expanduser()
    return (file / METADATA).is_file() or (file.suffix == ".ckpt" and file.is_file())


def preprocessing_of_checkpoint(path: str | Path) -> dict[str, Any] | None:
    """Return the preprocessing of a training's evaluation; None where the checkpoint does not hold it.

    Args:
        path: its checkpoint. A missing one is reported when the weights are loaded.
    """
    if not is_checkpoint(path):
        return None
    return recorded_preprocessing(AtomicCheckpointIO().load_checkpoint(Path(path).expanduser()))


def said(record: Mapping[str, Any] | None) -> str:
    """A record in words, the end of a sentence about a model."""
    if record is None or ("mean" not in record and "transform" not in record):
        return "the preprocessing of its images is unknown"
    if "transform" in record:
        return f"its images were prepared by {record['transform']}, which no file can say"
    size, resize = record["image_size"], record.get("resize") or record["image_size"]
    ways = {
        "shortest": f"the shorter side resized to {resize}, the middle of {size} x {size} pixels cut out",
        "squash": f"both sides resized to {resize}",
    }
    mean, std = (", ".join(f"{value:.4g}" for value in record[name]) for name in ("mean", "std"))
    return (
        f"its images were prepared so: {ways[record['resize_mode']]}, {record['interpolation']}, normalised with "
        f"mean ({mean}) and deviation ({std}) on the 0-1 scale"
    )
