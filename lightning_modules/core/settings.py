"""Groups of settings: frozen dataclasses in a constructor, plain nested dictionaries in a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from ...common.absent_network import AbsentNetwork
from ...common.errors import UserError
from ...common.names import did_you_mean

Group = TypeVar("Group")


def settings(kind: type[Group], value: Group | Mapping[str, Any]) -> Group:
    """Return a group of settings from an instance, or from a mapping of a checkpoint.

    Args:
        kind: a dataclass.
        value: an instance of it, or some of its fields by name.

    Raises:
        UserError: If the value is neither, or a name is unknown.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"Expected {kind.__name__} or a mapping of its fields, got {value!r}: give one of these.")
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in value:
        if name not in defaults:
            raise UserError(f"Expected fields of {kind.__name__}, got {name!r}: {did_you_mean(name, defaults)}")
    # YAML has no tuples.
    as_tuples = {name: isinstance(default, tuple) for name, default in defaults.items()}
    return kind(**{name: tuple(part) if as_tuples[name] else part for name, part in value.items()})


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments as plain data, which `torch.load(weights_only=True)` loads.

    Groups become dictionaries, and networks the name of their class. Callables given in Python, such as an optimizer
    factory, cannot be stored and become None; the command line describes callables as plain data.
    """
    return {name: _plain(value) for name, value in arguments.items()}


def flat(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted names, such as `vision.width`."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, AbsentNetwork):
        return {"class_path": value.name}
    if isinstance(value, nn.Module):
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}"}
    return None if callable(value) else value
