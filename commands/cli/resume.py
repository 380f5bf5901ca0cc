"""Merging of a checkpoint's values into the configuration of a run that resumes from it.

The checkpoint provides the seed and all values that are not given. LightningCLI parses the hyper-parameters of the
checkpoint after the command line, so that `--ckpt_path x --model.dim 99` trains with the old value without a warning
(lightning 2.6.6). In this package the checkpoint is the first config file instead, so that given values replace it.
"""

from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from ...common.absent_network import leave_out_networks
from ...common.class_arguments import subclasses
from ...common.errors import UserError
from ...common.messages import say, warn
from ...common.named_code import ForeignCode, TypedNames, check_described, imported
from .saved_run import LENGTHS, MONITORED, SavedRun
from .typed_values import Source, Typed, at, leaves, plain

_BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


def merge(saved: SavedRun, typed: Typed, trains: bool | None = None) -> dict[str, Any]:
    """Add the values of the checkpoint as the first source of values.

    The values of the module are used if its class is the same or was not given. The values of the datamodule are used
    only if no datamodule was given, since other data is a common use.

    Args:
        saved: The values of the checkpoint.
        typed: The parts of the command line, to which the source is added.
        trains: Whether teachers run, whose networks of the user's own are left out otherwise; None: in a `fit`.

    Returns:
        The values.

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
    """Return whether the checkpoint is of the given class.

    Returns:
        False also for an unknown name, which the parser refuses later.

    Raises:
        UserError: If the given class and that of the checkpoint are unrelated.
    """
    old = str(saved.hyper_parameters["model"]["class_path"])
    classes = subclasses((LightningModule,))
    named, saved_class = (imported(path) if "." in path else classes.get(path) for path in (name, old))
    if named is None or named is saved_class:
        return named is not None
    old = old.rpartition(".")[2]
    if saved_class is None or not (issubclass(named, saved_class) or issubclass(saved_class, named)):
        raise UserError(
            f"Expected a checkpoint of {named.__name__}, got {str(saved.path)!r} of {old}: leave out the model, which "
            "then comes from the checkpoint, or give another --ckpt_path."
        )
    warn(f"The model is {named.__name__}, but the checkpoint is of {old}, whose hyper-parameters are not used.")
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
        in_list = any(part.isdigit() for part in option.split("."))  # no option names an entry of a list
        remedy = "" if in_list else f"type --{option} {error.name}, or "
        raise UserError(
            f"Expected a class of vlightning or torch.optim for {option} in {str(saved.path)!r}, got {error.name!r}, "
            f"which could run any code: if you trust it, {remedy}give the config.yaml of the run with --config."
        ) from error


def report_overrides(saved: SavedRun, config: Any, typed: Typed) -> bool:
    """Warn of each value of the checkpoint that a given value replaces, and set the seed to that of the checkpoint.

    A given seed is not used, since sample order and random draws depend on the seed: with another seed the run would
    not continue.

    Args:
        saved: The values of the checkpoint.
        config: The parsed configuration of the subcommand, whose `seed_everything` is changed in place.
        typed: The parts of the command line.

    Returns:
        Whether a given hyper-parameter of the module replaces one of the checkpoint.
    """
    old = leaves(saved.hyper_parameters.get("model", {}).get("init_args", {}))
    new = plain((config.get("model") or {}).get("init_args") or {})
    given = {name: origin for name in old if (origin := typed.origin(f"model.init_args.{name}"))}
    replaced = [name for name in given if at(new, name) != old[name]]
    for name in replaced:
        warn(
            f"model.init_args.{name} is {at(new, name)!r} from {given[name]}; {old[name]!r} from the checkpoint is not "
            "used."
        )
    if saved.seed is not None and saved.seed != config.seed_everything:
        if typed.is_given("seed_everything"):
            warn(
                f"seed_everything is {config.seed_everything}, but {saved.seed} from the checkpoint is used, since the "
                "order of samples and all random draws of the run depend on it."
            )
        config.seed_everything = saved.seed
    return bool(replaced)


class TypedOptimizerOptions(Callback):
    """Let a learning rate, weight decay or beta that was typed on resume override the optimizer state.

    An optimizer's state holds its settings, and a scheduler's state the base learning rates, so restoring them undoes
    a typed learning rate although the module was built with it. This callback copies the settings of the new optimizer
    at `on_fit_start`, before the restore, and sets them again at `on_train_start`, after it; the schedule's current
    factor is applied to the new base rate. Moments and step counts stay those of the checkpoint.
    """

    def __init__(self) -> None:
        self._fresh: list[list[dict[str, Any]]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the settings of the new optimizers."""
        self._fresh = [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set them again."""
        for optimizer, fresh_groups in zip(trainer.optimizers, self._fresh, strict=True):
            for group, fresh in zip(optimizer.param_groups, fresh_groups, strict=True):
                old_base = group.get("initial_lr", group["lr"])
                new_base = fresh.get("initial_lr", fresh["lr"])
                factor = group["lr"] / old_base if old_base else 1.0
                group.update(fresh)
                group["lr"] = new_base * factor
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [
                    group.get("initial_lr", group["lr"]) for group in scheduler.optimizer.param_groups
                ]
