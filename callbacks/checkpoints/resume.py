"""A checkpoint's part in the configuration of a run that resumes from it: everything that was not typed, and the seed.

LightningCLI parses the checkpoint's hyper-parameters over the command line, so that `--ckpt_path x --model.dim 99`
silently trains with the old value (lightning 2.6.6). Here the checkpoint is the first config file instead: everything
typed comes later and wins, as one `--config` wins over an earlier one.
"""

from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from ...common.class_arguments import subclasses
from ...common.errors import UserError
from ...common.messages import say, warn
from ...common.named_code import ForeignCode, TypedNames, check_described, imported
from ...common.typed_values import Source, Typed, at, leaves, plain
from .run_config import LENGTHS
from .saved_run import SavedRun

_BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


def merge(saved: SavedRun, typed: Typed) -> dict[str, Any]:
    """Put the checkpoint's values before everything that was typed, as a source of their own.

    The module's values are used if the same class, or none, was typed; the datamodule's only if none was typed, since
    another data set is a common wish.

    Returns:
        The values.

    Raises:
        UserError: If the checkpoint is of another class than the typed one, or names code that it may not name.
    """
    names = TypedNames([source.tree for source in typed.sources])
    tree: dict[str, Any] = {}
    for section in saved.hyper_parameters:
        name = typed.lookup(f"{section}.class_path")
        if name is None or (section == "model" and _is_same_model(saved, str(name))):
            tree[section] = _checked(saved, section, typed, names)
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
    if kept := [f"{name} {value}" for name, value in settings.items() if not typed.is_given(f"trainer.{name}")]:
        say(f"From the checkpoint's run: trainer.{', trainer.'.join(kept)}.")
    if tree:
        typed.sources.insert(0, Source(str(saved.path), tree, "checkpoint"))
    return tree


def _is_same_model(saved: SavedRun, name: str) -> bool:
    """Return whether the checkpoint is of the typed class; False also for a typing error, which the parser explains."""
    old = str(saved.hyper_parameters["model"]["class_path"])
    known = subclasses((LightningModule,))
    named, found = (imported(path) if "." in path else known.get(path) for path in (name, old))
    if named is None or named is found:
        return named is not None
    old = old.rpartition(".")[2]
    if found is None or not (issubclass(named, found) or issubclass(found, named)):
        raise UserError(
            f"The checkpoint {str(saved.path)!r} is of {old}, expected one of {named.__name__}: leave "
            "out the model, which then comes from the checkpoint, or give another --ckpt_path."
        )
    warn(f"model is {named.__name__}, the checkpoint is of {old}: its hyper-parameters are not used.")
    return False


def _checked(saved: SavedRun, section: str, typed: Typed, names: TypedNames) -> dict[str, Any]:
    """Return a section of the checkpoint, without foreign code that a typed class replaces."""

    def is_replaced(argument: str) -> bool:
        instead = typed.lookup(f"{section}.init_args.{argument}")
        return isinstance(instead, str) or (isinstance(instead, dict) and "class_path" in instead)

    try:
        return check_described(saved.hyper_parameters[section], _BASES[section], names, is_replaced)
    except ForeignCode as error:
        option = f"{section}.{error.key}".rstrip(".")
        raise UserError(
            f"The checkpoint {str(saved.path)!r} names {error.name!r} for {option}, which is no class of vlightning or "
            f"of torch.optim, so that it could run any code: if you trust it, type --{option} {error.name}, or give "
            "the run's own config.yaml with --config."
        ) from error


def report_overrides(saved: SavedRun, config: Any, typed: Typed) -> bool:
    """Warn of each value of the checkpoint that a typed one replaces, and put the checkpoint's seed into the config.

    The seed is the exception because sample order and random draws follow from it: a resumed run with another seed
    would be neither the old run nor a new one.

    Args:
        saved: The checkpoint's values.
        config: The parsed configuration of the subcommand; its `seed_everything` is changed in place.
        typed: What was typed.

    Returns:
        Whether a typed hyper-parameter of the module replaces one of the checkpoint.
    """
    old = leaves(saved.hyper_parameters.get("model", {}).get("init_args", {}))
    new = plain((config.get("model") or {}).get("init_args") or {})
    given = {name: origin for name in old if (origin := typed.origin(f"model.init_args.{name}"))}
    replaced = [name for name in given if at(new, name) != old[name]]
    for name in replaced:
        warn(
            f"model.init_args.{name} is {at(new, name)!r} by {given[name]}; the checkpoint's {old[name]!r} is not used."
        )
    if saved.seed is not None and saved.seed != config.seed_everything:
        if typed.is_given("seed_everything"):
            warn(
                f"seed_everything is {config.seed_everything} by what was typed, but the checkpoint's {saved.seed} is "
                "used: the order of samples and every random draw of the run follow from it."
            )
        config.seed_everything = saved.seed
    return bool(replaced)
