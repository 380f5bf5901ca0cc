"""Groups of settings: frozen dataclasses in a constructor, plain nested dictionaries in a checkpoint."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from torch import nn

from ...common.absent_network import AbsentNetwork
from ...common.class_arguments import settings_group
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
    return kind(**{name: tuple(field_value) if as_tuples[name] else field_value for name, field_value in value.items()})


def groups_of(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings groups among the arguments of a constructor, as instances.

    Args:
        cls: the class of the constructor. An argument whose type is a dataclass is a group.
        arguments: the values by name: instances, or mappings of their fields; None if the type allows it.

    Raises:
        UserError: If a value is neither, has an unknown field, or the types of the constructor are not imported.
    """
    groups: dict[str, Any] = {}
    for name, hint in _types(cls).items():
        if (group := settings_group(hint)) is not None:
            absent = arguments[name] is None and type(None) in get_args(hint)
            groups[name] = None if absent else settings(group, arguments[name])
    return groups


def accepted_names(cls: type) -> set[str]:
    """Return the names of a constructor's arguments, with those of base classes that its `**kwargs` reach."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            names |= {parameter.name for parameter in parameters}
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                break
    return names


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls.__init__)  # type: ignore[misc]
    except NameError as error:
        raise UserError(
            f"Expected types of {cls.__name__}'s arguments that are imported when the program runs, got {error}: "
            "import them outside `if TYPE_CHECKING:`."
        ) from error


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments as plain data, which `torch.load(weights_only=True)` loads.

    Groups become dictionaries, and networks the name of their class. Callables given in Python, such as an optimizer
    factory, cannot be stored and become None; the command line describes callables as plain data.
    """
    return {name: _plain(value) for name, value in arguments.items()}


def class_path(network: nn.Module) -> str:
    """Return the name of a network's class with its module."""
    return f"{type(network).__module__}.{type(network).__qualname__}"


def flat(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted names, such as `vision.width`."""
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, AbsentNetwork):
        return {"class_path": value.name}
    if isinstance(value, nn.Module):
        return {"class_path": class_path(value)}
    return None if callable(value) else value
