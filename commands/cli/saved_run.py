"""Information in a checkpoint about the run that wrote it."""

import inspect
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningDataModule

from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ...callbacks.compile import CompileMode
from ...common.class_arguments import subclasses
from ...common.errors import UserError
from ...common.files import relative_to_here, run_folder_of
from ...common.named_code import INSTANTIATORS

# Where a checkpoint has the settings of its run.
RUN_KEY = "vlightning_run"
# Settings of the Trainer that shape the result, apart from the hardware.
LENGTHS = ("max_epochs", "max_steps")
SHAPING = (
    *(*LENGTHS, "min_epochs", "min_steps", "max_time", "precision"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
)

# Arguments of the run's best checkpoint that decide which one is the best.
MONITORED = ("monitor", "mode")


@dataclass
class SavedRun:
    """Values of a checkpoint from which its run can be continued.

    Args:
        path: The file, or the folder of a sharded checkpoint.
        hyper_parameters: Section name (`model`, `data`) to `{"class_path": ..., "init_args": {...}}`.
        seed: The run's seed, if the checkpoint holds one.
        trainer: The run's settings of the Trainer that shape the result.
        name: The run's name; None if the checkpoint holds none.
        checkpoint: Which metric chose the run's best checkpoint.
        compile: The run's argument `compile`; False if it compiled nothing.
    """

    path: Path
    hyper_parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    checkpoint: dict[str, str] = field(default_factory=dict)
    compile: CompileMode | Literal[False] = False

    @property
    def folder(self) -> Path:
        """Folder of the run that wrote the checkpoint, if the checkpoint is still where it was written."""
        return run_folder_of(self.path)

    @property
    def save_dir(self) -> Path | None:
        """Folder of all runs that the checkpoint lies in, if it is still where it was written."""
        folders = self.folder.absolute().parent.parts
        name = Path(self.name or "").parts
        return relative_to_here(Path(*folders[: -len(name)])) if name and folders[-len(name) :] == name else None


def read_saved_run(path: Path) -> SavedRun:
    """Read a checkpoint's hyper-parameters, settings and seed; unpickles nothing but tensors and plain data.

    Args:
        path: A checkpoint file, or the folder of a sharded one.

    Raises:
        UserError: If it is not a checkpoint, or holds more than tensors and plain data.
    """
    if path.is_dir() and not (path / METADATA).is_file():
        raise UserError(
            f"Expected a complete checkpoint, got the folder {str(path)!r} without {METADATA}, which is written last: "
            "take another checkpoint."
        )
    if path.name == METADATA:
        raise UserError(
            f"Expected a whole checkpoint, got {str(path)!r}, a part of a sharded checkpoint: give the folder, "
            f"{str(path.parent)!r}."
        )
    try:
        content = torch.load(_metadata(path), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"Expected a checkpoint that can be loaded safely (weights_only=True), got {str(path)!r}, which is damaged "
            "or holds more than tensors and plain data: take another checkpoint."
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise UserError(
            f"Expected a readable checkpoint, got {str(path)!r} ({' '.join(str(error).split())[:200]}): take another "
            "one."
        ) from error
    if not isinstance(content, Mapping) or ("state_dict" not in content and not path.is_dir()):
        raise UserError(f"Expected a Lightning checkpoint, got {str(path)!r} without `state_dict`: give another file.")
    run = content.get(RUN_KEY)
    run = run if isinstance(run, Mapping) else {}
    name = run.get("name")
    inside = isinstance(name, str) and name and not Path(name).is_absolute() and ".." not in Path(name).parts
    saved = SavedRun(path, seed=_seed(content), trainer=_settings(run.get("trainer")), name=name if inside else None)
    saved.compile = run["compile"] if run.get("compile") in get_args(CompileMode) else False
    best = run.get("checkpoint")
    if isinstance(best, Mapping) and all(isinstance(best.get(argument), str) for argument in MONITORED):
        saved.checkpoint = {argument: best[argument] for argument in MONITORED}
    for section, key in (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters")):
        values = dict(content.get(key) or {})
        if (instantiator := values.pop("_instantiator", None)) not in (None, *INSTANTIATORS):
            raise UserError(
                f"Expected a {section} that is built by the function that Lightning names, got {instantiator!r} in the "
                f"checkpoint {str(path)!r}, which could run any code: take a checkpoint that you trust."
            )
        class_path = values.pop("_class_path", None)
        if section == "data" and class_path is None:
            class_path = _datamodule_class(content, values)
        if class_path:
            saved.hyper_parameters[section] = {"class_path": class_path, "init_args": values}
    return saved


def _metadata(checkpoint: Path) -> Path:
    return checkpoint / METADATA if checkpoint.is_dir() else checkpoint


def _datamodule_class(content: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """Return the datamodule's class, which is the key of its state; None if some of its arguments were not saved."""
    for name, cls in subclasses((LightningDataModule,)).items():
        if name in content and set(inspect.signature(cls).parameters) == set(values):
            return name
    return None


def _settings(settings: Any) -> dict[str, Any]:
    """Return the known settings of the Trainer that are numbers or names."""
    if not isinstance(settings, Mapping):
        return {}
    plain: dict[str, Any] = {
        name: value for name in SHAPING if isinstance(value := settings.get(name), (int, float, str))
    }
    time = settings.get("max_time")
    if isinstance(time, Mapping) and all(isinstance(amount, int) for amount in time.values()):
        plain["max_time"] = dict(time)
    return plain


def _seed(content: Mapping[str, Any]) -> int | None:
    """Return the run's seed: of the state of `StepSeedCallback`, or of a datamodule's state."""
    callbacks = content.get("callbacks") or {}
    states = [state for name, state in callbacks.items() if str(name).startswith("StepSeedCallback")]
    states += [state for name, state in content.items() if name not in ("callbacks", "state_dict", "loops")]
    seeds = [state.get("seed") for state in states if isinstance(state, Mapping)]
    return next((seed for seed in seeds if isinstance(seed, int) and not isinstance(seed, bool)), None)
