"""Explanations for weights of a checkpoint that do not fit a module."""

import inspect
from collections.abc import Mapping
from typing import Any

from lightning import LightningModule

from ...common.class_arguments import subclasses
from .settings import flat

_NO_SIZES = ("optimizer", "lr_scheduler", "optim")


def explain_misfit(cls: type, given: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Explain why weights do not fit by comparing settings; None if the settings do not explain it.

    Args:
        cls: class of the module.
        given: hyper-parameters of the module.
        saved: hyper-parameters of the checkpoint.
    """
    if (other := explain_other_class(cls, saved)) is not None:
        return other
    own = flat({name: value for name, value in given.items() if name not in _NO_SIZES})
    differing = [
        f"{argument} is {own[argument]!r}, in the checkpoint {value!r}"
        for argument, value in flat(saved).items()
        # No weight's shape depends on a rate or on the name of a file.
        if argument in own and not isinstance(value, float) and not argument.endswith("weights")
        if _as_lists(own[argument]) != _as_lists(value)
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
    name = _class_name(saved)
    if name is None or name in (base.__name__ for base in cls.__mro__):
        return None
    return f"Expected a checkpoint of {cls.__name__}, got one of {name}: give another checkpoint, or use {name}."


def _class_name(saved: Mapping[str, Any]) -> str | None:
    """Return the class of a checkpoint: as recorded by the command line, else the class with most of its arguments."""
    if "_class_path" in saved:
        return str(saved["_class_path"]).rpartition(".")[2]
    # Lightning adds the arguments of `load_from_checkpoint`.
    arguments = {name: set(inspect.signature(cls).parameters) for name, cls in subclasses((LightningModule,)).items()}
    having = {name: len(all_of) for name, all_of in arguments.items() if all_of and all_of <= set(saved)}
    most = [name for name, count in having.items() if count == max(having.values())]
    return most[0] if len(most) == 1 else None


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
