"""What a checkpoint contributes to the configuration: everything that was not typed, and the seed.

LightningCLI parses the checkpoint's hyper-parameters over the command line, so that `--ckpt_path x --model.dim 99`
silently trains with the old value (lightning 2.6.6). Here the checkpoint is the first config file instead: whatever is
typed comes later and wins, in the way in which one `--config` wins over an earlier one.
"""

import contextlib
import inspect
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from ..callbacks.checkpoints.sharded_checkpoint import METADATA
from ..common.class_arguments import subclasses
from ..common.named_code import INSTANTIATORS, ForeignCode, TypedNames, check_arguments, check_class, imported
from ..common.names import nearest
from .command_line import Source, Typed, UsageError
from .report import say, tell
from .save_config import LENGTHS, RUN_KEY, SHAPING

# Values of `ckpt_path` that Lightning resolves itself, once the run has begun.
KEYWORDS = ("last", "best", "hpc")
_BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


@dataclass
class Saved:
    """What a checkpoint says about how it was made.

    Args:
        path: The file, or the folder of a sharded checkpoint.
        hyper_parameters: Section name (`model`, `data`) to `{"class_path": ..., "init_args": {...}}`.
        seed: The run's seed, if the checkpoint holds one.
        trainer: The run's settings of the Trainer that shape the result.
        name: The run's name; None if the checkpoint does not tell.
    """

    path: Path
    hyper_parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    name: str | None = None


def find_checkpoint(typed: Typed) -> Path | None:
    """The checkpoint that was named, as a path.

    Args:
        typed: What was typed.

    Returns:
        The file or folder; None if none was named, or a keyword or URL that Lightning resolves.

    Raises:
        UsageError: If there is no such file; names the nearest one.
    """
    name = typed.lookup("ckpt_path")
    if not isinstance(name, str) or name in KEYWORDS or "://" in name or name.startswith("registry"):
        return None
    path = Path(name)
    if path.exists():
        return path
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    near = sorted(str(p) for p in (folder.rglob("*.ckpt") if str(folder) not in (".", "/") else folder.glob("*.ckpt")))
    match = next(iter([*nearest(name, near), *near]), None)
    hint = f"the nearest is {match!r}." if match else f"there is no .ckpt file under {str(folder)!r}."
    raise UsageError(f"The checkpoint {name!r} does not exist; {hint}")


def read_checkpoint(path: Path) -> Saved:
    """Read a checkpoint's hyper-parameters and seed; nothing but tensors and plain data is unpickled.

    Args:
        path: A checkpoint file, or the folder of a sharded one.

    Returns:
        What it says.

    Raises:
        UsageError: If it is not a checkpoint, or holds more than tensors and plain data.
    """
    if path.is_dir() and not (path / METADATA).is_file():
        raise UsageError(f"{str(path)!r} is no whole checkpoint: the folder has no {METADATA}, which is written last.")
    if path.name == METADATA:
        raise UsageError(f"{str(path)!r} is a part of a sharded checkpoint: give the folder, {str(path.parent)!r}.")
    file = path / METADATA if path.is_dir() else path
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"The checkpoint {str(path)!r} cannot be loaded safely (weights_only=True): it is damaged, or holds more "
            "than tensors and plain data."
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise UsageError(f"{str(path)!r} is not a readable checkpoint: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, Mapping) or ("state_dict" not in content and not path.is_dir()):
        raise UsageError(f"{str(path)!r} is not a Lightning checkpoint: it has no `state_dict`.")
    run = content.get(RUN_KEY)
    run = run if isinstance(run, Mapping) else {}
    saved = Saved(path, seed=_seed(content), trainer=_plain_settings(run.get("trainer")), name=_inside(run.get("name")))
    for section, key in (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters")):
        values = dict(content.get(key) or {})
        if (instantiator := values.pop("_instantiator", None)) not in (None, *INSTANTIATORS):
            raise UsageError(
                f"The checkpoint {str(path)!r} has its {section} built by {instantiator!r}, which could run any code; "
                "expected the function that Lightning names there: take a checkpoint that you trust."
            )
        class_path = values.pop("_class_path", None)
        if section == "data" and class_path is None:
            class_path = _datamodule_class(content, values)
        if class_path:
            saved.hyper_parameters[section] = {"class_path": class_path, "init_args": values}
    return saved


def best_beside(checkpoint: Path) -> Path | None:
    """The best checkpoint that a run knew when it wrote this one, if it is still in the same folder.

    Args:
        checkpoint: A whole checkpoint, a file or a folder.
    """
    file = checkpoint / METADATA if checkpoint.is_dir() else checkpoint
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    for name, state in (content.get("callbacks") or {}).items():
        best = state.get("best_model_path") if isinstance(state, Mapping) else None
        if str(name).startswith("BestCheckpoint") and isinstance(best, str) and best:
            path = checkpoint.with_name(Path(best).name)
            return path if path.exists() else None
    return None


def merge(saved: Saved, typed: Typed) -> None:
    """Put the checkpoint's values before everything that was typed.

    The module's are used if the same class, or none, was typed; the datamodule's if none was typed, since another data
    set is a common wish.

    Args:
        saved: The checkpoint's values.
        typed: What was typed; its sources get one more, at the front.

    Raises:
        UsageError: If the checkpoint is of another class than the one that was typed, or names code that it may not
            name.
    """
    names = TypedNames([source.tree for source in typed.sources if source.kind != "checkpoint"])
    tree: dict[str, Any] = {}
    for section, values in saved.hyper_parameters.items():
        if typed.class_path(section) is None:
            tree[section] = _checked(saved, section, typed, names)
        elif section == "model":
            known = subclasses((LightningModule,))
            named, found = (_find(name, known) for name in (typed.class_path(section), values["class_path"]))
            if named is None:  # a typing error, which the parser explains
                continue
            if named is found:
                tree[section] = _checked(saved, section, typed, names)
                continue
            old = str(values["class_path"]).rpartition(".")[2]
            if found is None or not (issubclass(named, found) or issubclass(found, named)):
                raise UsageError(
                    f"The checkpoint {str(saved.path)!r} is of {old}, expected one of {named.__name__}: leave "
                    "out the model, which then comes from the checkpoint, or give another --ckpt_path."
                )
            tell(f"model is {named.__name__}, the checkpoint is of {old}: its hyper-parameters are not used.")
    saved.hyper_parameters |= tree
    settings = {
        name: value
        for name, value in saved.trainer.items()
        # An evaluation has no length; one that was typed stands for both.
        if (typed.subcommand == "fit" or name == "precision")
        and not (name in LENGTHS and any(typed.is_given(f"trainer.{length}") for length in LENGTHS))
    }
    if settings:
        tree["trainer"] = settings
        kept = [f"{name} {value}" for name, value in settings.items() if not typed.is_given(f"trainer.{name}")]
        if kept:
            say(f"From the checkpoint's run: trainer.{', trainer.'.join(kept)}.")
    if tree:
        typed.sources.insert(0, Source(str(saved.path), tree, "checkpoint"))


def _checked(saved: Saved, section: str, typed: Typed, names: TypedNames) -> dict[str, Any]:
    """A section of the checkpoint that names no code but its own, without what was typed in the place of other code."""
    values = saved.hyper_parameters[section]
    arguments: dict[str, Any] = {}
    try:
        name, cls = check_class(values["class_path"], (_BASES[section],), names)
        for argument, value in values["init_args"].items():
            try:
                arguments |= check_arguments({argument: value}, cls, names)
            except ForeignCode:
                instead = typed.lookup(f"{section}.init_args.{argument}")
                if not (isinstance(instead, str) or (isinstance(instead, dict) and "class_path" in instead)):
                    raise
    except ForeignCode as error:
        option = ".".join([section, *([error.key] if error.key else [])])
        raise UsageError(
            f"The checkpoint {str(saved.path)!r} names {error.name!r} for {option}, which is no class of vlightning or "
            f"of torch.optim, so that it could run any code: if you trust it, type --{option} {error.name}, or give "
            "the run's own config.yaml with --config."
        ) from error
    return {"class_path": name, "init_args": arguments}


def _find(name: Any, known: dict[str, type]) -> type | None:
    return imported(str(name)) if "." in str(name) else known.get(str(name))


@contextlib.contextmanager
def as_first_config(typed: Typed) -> Iterator[list[str]]:
    """The words for the parser, with the checkpoint's values as the first config file.

    Args:
        typed: What was typed, after `merge` if there is a checkpoint.

    Yields:
        The words.
    """
    words = list(typed.args)
    if not typed.sources or typed.sources[0].kind != "checkpoint":
        yield words
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.yaml"
        file.write_text(yaml.safe_dump(typed.sources[0].tree), encoding="utf-8")
        words.insert(words.index(str(typed.subcommand)) + 1, f"--config={file}")
        yield words


def report_overrides(saved: Saved | None, config: Any, typed: Typed) -> bool:
    """Print a line for each value of the checkpoint that a typed one replaces, and let the checkpoint's seed win.

    The seed is the exception because sample order and draws are functions of it: a resumed run with another seed would
    be neither the old run nor a new one.

    Args:
        saved: What the checkpoint says; None without one.
        config: The parsed configuration of the subcommand; its `seed_everything` is changed in place.
        typed: What was typed.

    Returns:
        Whether a typed hyper-parameter of the module replaces one of the checkpoint.
    """
    if saved is None:
        return False
    old = _leaves(saved.hyper_parameters.get("model", {}).get("init_args", {}))
    new = _plain((config.get("model") or {}).get("init_args") or {})
    typed_names = [(name, origin) for name in old if (origin := typed.origin(f"model.init_args.{name}"))]
    replaced = [(name, origin) for name, origin in typed_names if at(new, name) != old[name]]
    for name, origin in replaced:
        tell(f"model.init_args.{name} is {at(new, name)!r} by {origin}; the checkpoint's {old[name]!r} is not used.")
    if saved.seed is not None and saved.seed != config.seed_everything:
        if typed.is_given("seed_everything"):
            tell(
                f"seed_everything is {config.seed_everything} by what was typed, but the checkpoint's {saved.seed} is "
                "used: the order of samples and every draw of the run follow from it."
            )
        config.seed_everything = saved.seed
    return bool(replaced)


def _datamodule_class(content: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """Name of the datamodule's class, which is the key of its state; None if some of its arguments were not saved."""
    for name, cls in subclasses((LightningDataModule,)).items():
        if name in content and set(inspect.signature(cls).parameters) == set(values):
            return name
    return None


def at(values: Any, place: str) -> Any:
    """Return the value at a dotted place of nested mappings, or None."""
    for part in place.split("."):
        values = values.get(part) if hasattr(values, "get") else None
    return values


def _leaves(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return arguments by dotted name, with groups of settings opened."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        group = isinstance(value, Mapping) and value and "class_path" not in value
        found |= _leaves(value, f"{prefix}{name}.") if group else {f"{prefix}{name}": _plain(value)}
    return found


def _plain(value: Any) -> Any:
    """Namespaces as dicts and tuples as lists, so that values from a checkpoint and from the parser compare."""
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _plain_settings(settings: Any) -> dict[str, Any]:
    """Those of the settings in a checkpoint that are known, as far as they are numbers or names."""
    if not isinstance(settings, Mapping):
        return {}
    plain: dict[str, Any] = {
        name: value for name in SHAPING if isinstance(value := settings.get(name), (int, float, str))
    }
    time = settings.get("max_time")
    if isinstance(time, Mapping) and all(isinstance(amount, int) for amount in time.values()):
        plain["max_time"] = dict(time)
    return plain


def _inside(name: Any) -> str | None:
    """The name of a run in a checkpoint, if it leads to no folder outside that of all runs."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        return None
    return name


def _seed(content: Mapping[str, Any]) -> int | None:
    """The run's seed: in the state of `StepSeedCallback`, or in that of a datamodule."""
    states = [
        state for name, state in (content.get("callbacks") or {}).items() if str(name).startswith("StepSeedCallback")
    ]
    states += [state for name, state in content.items() if name not in ("callbacks", "state_dict", "loops")]
    for state in states:
        seed = state.get("seed") if isinstance(state, Mapping) else None
        if isinstance(seed, int) and not isinstance(seed, bool):
            return seed
    return None
