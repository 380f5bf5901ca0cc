"""Explanations for weights of a checkpoint that do not fit a module."""

from collections.abc import Mapping
from typing import Any

from lightning import LightningModule
from torch.distributed.fsdp import FSDPModule

from .settings import flat

_NO_SIZES = ("optimizer", "lr_scheduler", "optim")


CLASS_KEY = "module_class"
"""Entry of a checkpoint with the name of the module's class."""


RESULTS_KEY = "validation_results"
"""Entry of a checkpoint with the results of the last validation before it: metrics and known chance levels."""


ORDERS_KEY = "retrieval_orders"
"""Entry of a checkpoint and of an export with the mean recall of both orders of retrieval; see `Orders`."""


def class_name(module: LightningModule) -> str:
    """Return the name of a module's class, which FSDP2 replaces by a subclass of its own."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def saved_settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a checkpoint with the class: the command line saves it there, Python does not."""
    saved = dict(checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {})
    return {"_class_path": checkpoint[CLASS_KEY], **saved} if CLASS_KEY in checkpoint else saved


def class_of(saved: Mapping[str, Any]) -> str | None:
    """Return the name of the class of saved settings; None if another program wrote them."""
    return str(saved["_class_path"]).rpartition(".")[2] if "_class_path" in saved else None


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
    name = class_of(saved)
    if name is None or name in (base.__name__ for base in cls.__mro__):
        return None
    return f"Expected a checkpoint of {cls.__name__}, got one of {name}: give another checkpoint, or use {name}."


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
