"""A checkpoint's part in the configuration: everything that was not typed, and the seed.

LightningCLI parses the checkpoint's hyper-parameters over the command line, so that `--ckpt_path x --model.dim 99`
silently trains with the old value (lightning 2.6.6). Here the checkpoint is the first config file instead: everything
typed comes later and wins, as one `--config` wins over an earlier one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from ..callbacks.checkpoints.saved_run import LENGTHS, SavedRun
from ..common.class_arguments import subclasses
from ..common.messages import say, warn
from ..common.named_code import ForeignCode, TypedNames, check_described, imported
from ..common.names import nearest
from .command_line import Source, Typed, UsageError

# Values of `ckpt_path` that Lightning resolves itself, once the run has begun.
KEYWORDS = ("last", "best", "hpc")
_BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


def find_checkpoint(typed: Typed) -> Path | None:
    """Return the path of the typed checkpoint; None without one, or for a keyword or URL that Lightning resolves.

    Raises:
        UsageError: If there is no such file; names the nearest one.
    """
    name = typed.lookup("ckpt_path")
    if not isinstance(name, str) or name in KEYWORDS or "://" in name or name.startswith("registry"):
        return None
    path = Path(name)
    if path.exists():
        return path
    folder = next(parent for parent in path.parents if parent.is_dir())
    near = sorted(str(p) for p in (folder.rglob("*.ckpt") if str(folder) not in (".", "/") else folder.glob("*.ckpt")))
    match = next(iter([*nearest(name, near), *near]), None)
    hint = f"the nearest is {match!r}." if match else f"there is no .ckpt file under {str(folder)!r}."
    raise UsageError(f"The checkpoint {name!r} does not exist; {hint}")


def merge(saved: SavedRun, typed: Typed) -> None:
    """Put the checkpoint's values before everything that was typed, as a source of their own.

    The module's values are used if the same class, or none, was typed; the datamodule's only if none was typed, since
    another data set is a common wish.

    Raises:
        UsageError: If the checkpoint is of another class than the typed one, or names code that it may not name.
    """
    names = TypedNames([source.tree for source in typed.sources if source.kind != "checkpoint"])
    tree: dict[str, Any] = {}
    for section, values in saved.hyper_parameters.items():
        if typed.class_path(section) is None:
            tree[section] = _checked(saved, section, typed, names)
        elif section == "model":
            known = subclasses((LightningModule,))
            paths = [str(typed.class_path(section)), str(values["class_path"])]
            named, found = (imported(path) if "." in path else known.get(path) for path in paths)
            if named is None:  # a typing error, which the parser explains
                continue
            if named is found:
                tree[section] = _checked(saved, section, typed, names)
                continue
            old = paths[1].rpartition(".")[2]
            if found is None or not (issubclass(named, found) or issubclass(found, named)):
                raise UsageError(
                    f"The checkpoint {str(saved.path)!r} is of {old}, expected one of {named.__name__}: leave "
                    "out the model, which then comes from the checkpoint, or give another --ckpt_path."
                )
            warn(f"model is {named.__name__}, the checkpoint is of {old}: its hyper-parameters are not used.")
    saved.hyper_parameters |= tree
    settings = {
        name: value
        for name, value in saved.trainer.items()
        # An evaluation has no length; a typed length replaces both of the checkpoint's.
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


def _checked(saved: SavedRun, section: str, typed: Typed, names: TypedNames) -> dict[str, Any]:
    """Return a section of the checkpoint, without foreign code that a typed class replaces."""

    def is_replaced(argument: str) -> bool:
        instead = typed.lookup(f"{section}.init_args.{argument}")
        return isinstance(instead, str) or (isinstance(instead, dict) and "class_path" in instead)

    try:
        return check_described(saved.hyper_parameters[section], _BASES[section], names, is_replaced)
    except ForeignCode as error:
        option = ".".join([section, *([error.key] if error.key else [])])
        raise UsageError(
            f"The checkpoint {str(saved.path)!r} names {error.name!r} for {option}, which is no class of vlightning or "
            f"of torch.optim, so that it could run any code: if you trust it, type --{option} {error.name}, or give "
            "the run's own config.yaml with --config."
        ) from error


def words_for_parser(typed: Typed) -> list[str]:
    """Return the words for the parser, with the checkpoint's values, if any, as the first config, in YAML."""
    words = list(typed.args)
    if typed.sources and typed.sources[0].kind == "checkpoint":
        tree = yaml.safe_dump(typed.sources[0].tree, default_flow_style=True, width=float("inf"))
        words.insert(words.index(str(typed.subcommand)) + 1, f"--config={tree}")
    return words


def report_overrides(saved: SavedRun | None, config: Any, typed: Typed) -> bool:
    """Warn of each value of the checkpoint that a typed one replaces, and put the checkpoint's seed into the config.

    The seed is the exception because sample order and random draws follow from it: a resumed run with another seed
    would be neither the old run nor a new one.

    Args:
        saved: The checkpoint's values; None without one.
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
        warn(f"model.init_args.{name} is {at(new, name)!r} by {origin}; the checkpoint's {old[name]!r} is not used.")
    if saved.seed is not None and saved.seed != config.seed_everything:
        if typed.is_given("seed_everything"):
            warn(
                f"seed_everything is {config.seed_everything} by what was typed, but the checkpoint's {saved.seed} is "
                "used: the order of samples and every random draw of the run follow from it."
            )
        config.seed_everything = saved.seed
    return bool(replaced)


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
    """Return namespaces as dicts and tuples as lists, so that values from a checkpoint and from the parser compare."""
    value = value.as_dict() if hasattr(value, "as_dict") else value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
