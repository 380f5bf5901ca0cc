"""The checkpoint of a run: which one of a run's folder, what it says of its run, and its values in a run that resumes.

The checkpoint provides the seed and all values that are not given. LightningCLI parses the hyper-parameters of the
checkpoint after the command line, so that `--ckpt_path x --model.dim 99` trains with the old value without a warning
(lightning 2.6.6). In this package the checkpoint is the first config file instead, so that given values replace it.
"""

import inspect
import math
import pickle
import pickletools
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from ...callbacks.checkpoints.checkpoint_io import newest_whole
from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ...callbacks.compile import CompileMode
from ...common.absent_network import leave_out_networks
from ...common.class_arguments import subclasses
from ...common.errors import UserError
from ...common.files import relative_to_here, run_folder_of
from ...common.messages import say, warn
from ...common.named_code import INSTANTIATORS, ForeignCode, TypedNames, check_described, imported
from .typed_values import Source, Typed, at, leaves, plain

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

_BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


def resolved(path: str | Path, best: bool = True) -> Path:
    """Return a path, or the checkpoint in it if it is a run's folder, whose choice is printed.

    Args:
        path: Checkpoint, export, run's folder, or any other path.
        best: Whether the best checkpoint is chosen, if the run keeps one; else the newest.

    Raises:
        UserError: If it is a run's folder without a whole checkpoint.
    """
    target = Path(path).expanduser()
    if not (target / "checkpoints").is_dir():
        return target
    newest = newest_checkpoint(target / "checkpoints")
    if newest is None:
        raise UserError(
            f"Expected a checkpoint in the run folder {str(target)!r}, got none: name another run or checkpoint."
        )
    kept = _kept_best(newest) if best else None
    checkpoint = newest if kept is None else kept.path
    say(f"Checkpoint: {checkpoint}, the {'newest' if checkpoint == newest else 'best'} of its run.")
    return checkpoint


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in a folder, with a warning for each newer damaged one; None if it is empty.

    Raises:
        UserError: If all are damaged.
    """
    newest, damaged = newest_whole(folder)
    for path, reason in damaged.items():
        warn(f"The checkpoint {str(path)!r} is damaged ({reason}).")
    if newest is None and damaged:
        raise UserError(
            f"Expected a whole checkpoint in {str(folder)!r}, got none: start anew, or give --ckpt_path the file of "
            "another run."
        )
    if damaged:
        warn(f"Going on from {str(newest)!r}, the newest one that is whole.")
    return newest


def last_saved(run: Path) -> float:
    """Return when the newest checkpoint in a run's folder was written, in seconds; 0 without one."""
    return max((path.stat().st_mtime for path in (run / "checkpoints").glob("*.ckpt")), default=0.0)


def best_of(runs: Sequence[Path]) -> Path | None:
    """Return the checkpoint that is the best one of several folders, and print it; None if none of them keeps one.

    Folders whose best checkpoint was chosen by another metric than that of the newest folder are left out.

    Args:
        runs: Run folders in ascending order of age; of equal values the newest one's is chosen.
    """
    candidates: list[_Best] = []
    for file in (file for run in runs for file in (run / "checkpoints").glob("*.ckpt")):
        try:
            best = _kept_best(file)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):  # damaged
            continue
        if best is not None and best.score is not None:
            candidates.append(best)
    if not candidates:
        return None
    monitor = candidates[-1].monitor
    mode = candidates[-1].mode
    sign = 1 if mode == "max" else -1
    chosen = None
    highest = -math.inf
    for best in candidates:
        if (best.monitor, best.mode) == (monitor, mode) and sign * float(best.score) >= highest:
            chosen = best.path
            highest = sign * float(best.score)
    if chosen is not None:
        say(f"Checkpoint: {chosen}, the best of its run, {monitor} {sign * highest:.4g}.")
    return chosen


class _Best(NamedTuple):
    """A run's best checkpoint, and the metric, mode and value by which it was chosen."""

    path: Path
    monitor: str
    mode: Literal["max", "min"]
    score: Any


def _kept_best(checkpoint: Path) -> _Best | None:
    """Return the best checkpoint when a run wrote this one, if it is still in the same folder."""
    for name, state in (_plain_content(checkpoint).get("callbacks") or {}).items():
        file = state.get("best_model_path") if isinstance(state, Mapping) else None
        if str(name).startswith("BestCheckpoint") and isinstance(file, str) and file:
            path = checkpoint.with_name(Path(file).name)
            mode: Literal["max", "min"] = "max" if "'mode': 'max'" in name else "min"
            best = _Best(path, str(state.get("monitor")), mode, state.get("best_model_score"))
            return best if path.exists() else None
    return None


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint, of which no more is read: Lightning writes it first."""
    with zipfile.ZipFile(_file_of(checkpoint)) as archive:
        content = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(content) as stream:
            written = islice(pickletools.genops(stream), 50)
            # References to earlier values have "PUT" in their names.
            values: list[Any] = [argument for operation, argument, _ in written if "PUT" not in operation.name]
    if "global_step" not in values:
        return int(_plain_content(checkpoint)["global_step"])
    return int(values[values.index("global_step") + 1])


def _plain_content(checkpoint: Path) -> Any:
    """Return the content of a checkpoint, whose tensors stay on the disk; that of a sharded one has no weights."""
    return torch.load(_file_of(checkpoint), map_location="cpu", weights_only=True, mmap=True)


def _file_of(checkpoint: Path) -> Path:
    return checkpoint / METADATA if checkpoint.is_dir() else checkpoint


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
        content = _plain_content(path)
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
    is_name = isinstance(name, str) and name and not Path(name).is_absolute() and ".." not in Path(name).parts
    saved = SavedRun(path, seed=_seed(content), trainer=_settings(run.get("trainer")), name=name if is_name else None)
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


def _datamodule_class(content: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """Return the datamodule's class, which is the key of its state; None if some of its arguments were not saved."""
    for name, cls in subclasses((LightningDataModule,)).items():
        if name in content and set(inspect.signature(cls).parameters) == set(values):
            return name
    return None


def _settings(settings: Any) -> dict[str, Any]:
    """Return the settings in `SHAPING` that are numbers or names."""
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


def merge(saved: SavedRun, typed: Typed, trains: bool | None = None) -> dict[str, Any]:
    """Add the values of the checkpoint as the first source of values.

    The values of the module are used if its class is the same or was not given. The values of the datamodule are used
    only if no datamodule was given, since other data is a common use.

    Args:
        saved: The values of the checkpoint.
        typed: The parts of the command line, to which the source is added.
        trains: Whether teachers run, whose networks of the user's own are left out otherwise; None: in a `fit`.

    Returns:
        The values as nested dicts, from the subcommand's level down.

    Raises:
        UserError: If the checkpoint is of another class than the given one, or names code that could be unsafe.
    """
    names = TypedNames([source.tree for source in typed.sources])
    tree: dict[str, Any] = {}
    trains = typed.subcommand == "fit" if trains is None else trains
    if not trains and (model := saved.hyper_parameters.get("model")):
        leave_out_networks(model["init_args"])
    for section in saved.hyper_parameters:
        name = typed.lookup(f"{section}.class_path")
        if name is None or (section == "model" and _is_same_model(saved, str(name))):
            tree[section] = _checked(saved, section, typed, names)
    saved.hyper_parameters |= tree
    settings = {
        name: value
        for name, value in saved.trainer.items()
        # An evaluation has no length; a given length replaces both lengths in the checkpoint.
        if (typed.subcommand == "fit" or name == "precision")
        and not (name in LENGTHS and any(typed.is_given(f"trainer.{length}") for length in LENGTHS))
    }
    if settings:
        tree["trainer"] = settings
    kept = [f"trainer.{name} {value}" for name, value in settings.items() if not typed.is_given(f"trainer.{name}")]
    if saved.checkpoint and typed.subcommand == "fit" and not any(typed.is_given(f"checkpoint.{n}") for n in MONITORED):
        tree["checkpoint"] = saved.checkpoint
    if saved.compile and typed.subcommand == "fit":
        tree["compile"] = saved.compile
        kept += [] if typed.is_given("compile") else [f"compile {saved.compile}"]
    if kept:
        say(f"From the checkpoint's run: {', '.join(kept)}.")
    if tree:
        typed.sources.insert(0, Source(str(saved.path), tree, "checkpoint"))
    return tree


def _is_same_model(saved: SavedRun, name: str) -> bool:
    """Return whether the checkpoint is of the given class; False also for an unknown name, which the parser refuses.

    Raises:
        UserError: If the given class and that of the checkpoint are unrelated.
    """
    saved_name = str(saved.hyper_parameters["model"]["class_path"])
    classes = subclasses((LightningModule,))
    given_class, saved_class = (imported(path) if "." in path else classes.get(path) for path in (name, saved_name))
    if given_class is None or given_class is saved_class:
        return given_class is not None
    saved_name = saved_name.rpartition(".")[2]
    if saved_class is None or not (issubclass(given_class, saved_class) or issubclass(saved_class, given_class)):
        raise UserError(
            f"Expected a checkpoint of {given_class.__name__}, got {str(saved.path)!r} of {saved_name}: leave "
            "out the model, which then comes from the checkpoint, or give another --ckpt_path."
        )
    warn(
        f"The model is {given_class.__name__}, but the checkpoint is of {saved_name}, whose hyper-parameters are not "
        "used."
    )
    return False


def _checked(saved: SavedRun, section: str, typed: Typed, names: TypedNames) -> dict[str, Any]:
    """Return a section of the checkpoint, without foreign code that a given class replaces.

    Raises:
        UserError: If the section names other foreign code.
    """

    def is_replaced(argument: str) -> bool:
        instead = typed.lookup(f"{section}.init_args.{argument}")
        return isinstance(instead, str) or (isinstance(instead, dict) and "class_path" in instead)

    try:
        return check_described(saved.hyper_parameters[section], _BASES[section], names, is_replaced)
    except ForeignCode as error:
        option = f"{section}.{error.key}".rstrip(".")
        in_list = any(key.isdigit() for key in option.split("."))  # no option names an entry of a list
        remedy = "" if in_list else f"type --{option} {error.name}, or "
        raise UserError(
            f"Expected a class of vlightning or torch.optim for {option} in {str(saved.path)!r}, got {error.name!r}, "
            f"which could run any code: if you trust it, {remedy}give the config.yaml of the run with --config."
        ) from error


def report_overrides(saved: SavedRun, config: Any, typed: Typed) -> bool:
    """Warn of each value of the checkpoint that a given value replaces, and set the seed to that of the checkpoint.

    A given seed is not used, since sample order and random draws depend on the seed: with another seed the run would
    not continue.
    """
    saved_values = leaves(saved.hyper_parameters.get("model", {}).get("init_args", {}))
    values = plain((config.get("model") or {}).get("init_args") or {})
    replaced = False
    for name, saved_value in saved_values.items():
        origin = typed.origin(f"model.init_args.{name}")
        value = at(values, name)
        if origin and value != saved_value:
            replaced = True
            warn(f"model.init_args.{name} is {value!r} from {origin}; {saved_value!r} from the checkpoint is not used.")
    if saved.seed is not None and saved.seed != config.seed_everything:
        if typed.is_given("seed_everything"):
            warn(
                f"seed_everything is {config.seed_everything}, but {saved.seed} from the checkpoint is used, since the "
                "order of samples and all random draws of the run depend on it."
            )
        config.seed_everything = saved.seed
    return replaced
