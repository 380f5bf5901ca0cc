"""What checkpoints and exported folders contain, and explanations for weights that do not fit a module."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ...callbacks import AtomicCheckpointIO
from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ...common.errors import UserError
from ...common.preprocessing import recorded_preprocessing
from .settings import flat

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
"""Files of an exported folder."""
CLASS_KEY = "module_class"
"""Entry of a checkpoint with the name of the module's class."""
RESULTS_KEY = "validation_results"
"""Entry of a checkpoint with the results of the last validation before it: metrics and chance levels."""
ORDERS_KEY = "retrieval_orders"
"""Entry of a checkpoint and of an export with the mean recall of both orders of retrieval; see `Orders`."""
_NETWORKS = ("average.", "student.")
"""Names of the evaluated network in a module's weights."""
_NO_SIZES = ("optimizer", "lr_scheduler", "optim")


def unsharded_class(module: LightningModule) -> Any:
    """Return the class of a module, which FSDP2 replaces by a subclass when it shards the module."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def class_name(module: LightningModule) -> str:
    """Return the name of a module's class, without sharding."""
    return str(unsharded_class(module).__name__)


def saved_settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a checkpoint, with the class that only runs of the command line save there."""
    saved = dict(checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {})
    return {"_class_path": checkpoint[CLASS_KEY], **saved} if CLASS_KEY in checkpoint else saved


def class_of(saved: Mapping[str, Any]) -> str | None:
    """Return the name of the class of saved settings; None if another program wrote them."""
    return str(saved["_class_path"]).rpartition(".")[2] if "_class_path" in saved else None


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint of a training, a file or the folder of a sharded checkpoint."""
    file = Path(path).expanduser()
    return (file / METADATA).is_file() or (file.suffix == ".ckpt" and file.is_file())


def preprocessing_of_checkpoint(path: str | Path) -> dict[str, Any] | None:
    """Return the record of the evaluation's preprocessing in a training; None if it is not recorded.

    Args:
        path: checkpoint, or the folder of an export. A missing file is reported when the weights are loaded.
    """
    file = Path(path).expanduser()
    if is_folder(file):
        record: dict[str, Any] | None = read_folder(file)[0].get("preprocessing")
        return record
    return recorded_preprocessing(AtomicCheckpointIO().load_checkpoint(file)) if is_checkpoint(file) else None


def is_folder(path: Path) -> bool:
    """Return whether a path is an exported folder."""
    return (path / CONFIG_FILE).is_file()


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the state of an exported folder.

    Raises:
        UserError: If the folder is not an export, or is damaged.
    """
    config = read_config(folder)
    try:
        return config, load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise _damaged(folder, error) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of an exported folder.

    Raises:
        UserError: If the folder is not an export, or is damaged.
    """
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"Expected the folder of an export, got {str(folder)!r} without {' and without '.join(missing)}: correct "
            "the path, or write an export with `vlightning export`."
        )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(folder, error) from error
    if not isinstance(config, dict) or not {"class", "vlightning_version", "arguments"} <= config.keys():
        raise UserError(
            f"Expected the {CONFIG_FILE} of an export in {str(folder)!r}, got another file: correct the path."
        )
    return config


def tower_in(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights of a tower of the evaluated network in a checkpoint or an export of this package.

    Args:
        path: the checkpoint or the export.
        names: begins of the names of its weights in a network, of which the first that there is counts.

    Returns:
        The weights without these begins; empty if there is no such tower.

    Raises:
        UserError: If the folder is not an export, or is damaged.
    """
    if is_checkpoint(path):
        content: Mapping[str, Tensor] = AtomicCheckpointIO().load_checkpoint(path)["state_dict"]
    else:
        content = read_folder(path)[1]
    network = next((name for name in _NETWORKS if any(key.startswith(name) for key in content)), "")
    for name in names:
        begin = network + name
        state = {key.removeprefix(begin): tensor for key, tensor in content.items() if key.startswith(begin)}
        if state:
            return state
    return {}


def explain_misfit(cls: type, built: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Explain why weights do not fit by comparing settings; None if the settings do not explain it.

    Args:
        cls: class of the module.
        built: hyper-parameters of the module.
        saved: hyper-parameters of the checkpoint.
    """
    if (other := explain_other_class(cls, saved)) is not None:
        return other
    settings_here = flat({name: value for name, value in built.items() if name not in _NO_SIZES})
    differing = [
        f"{argument} is {settings_here[argument]!r}, in the checkpoint {value!r}"
        for argument, value in flat(saved).items()
        # No weight's shape depends on a rate or on the name of a file.
        if argument in settings_here and not isinstance(value, float) and not argument.endswith("weights")
        if _as_lists(settings_here[argument]) != _as_lists(value)
    ]
    if not differing:
        return None
    return f"The checkpoint does not fit {cls.__name__}: {'; '.join(differing)}; give what it was trained with."


def explain_other_class(cls: type, saved: Mapping[str, Any]) -> str | None:
    """Explain that a checkpoint is of another class; None if its class is the expected one or unknown.

    Args:
        cls: the expected class.
        saved: hyper-parameters of the checkpoint.
    """
    name = class_of(saved)
    if name is None or name in (base.__name__ for base in cls.__mro__):
        return None
    return f"Expected a checkpoint of {cls.__name__}, got one of {name}: give another checkpoint, or use {name}."


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"Expected a readable export in {str(folder)!r}, got a damaged one ({error}): export it again.")
