"""Arguments of classes, and classes that an argument's type allows."""

import collections.abc
import functools
import inspect
import sys
import sysconfig
import types
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from .names import did_you_mean
from .private_api import constructor_parameters

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
# Types with literal values.
PLAIN = (str, int, float, bool, bytes, list, tuple, dict, set, type(None), object)
_IN_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


@functools.cache  # datamodules pass arguments on to their bases, which takes 50 ms
def parameters(cls: type) -> dict[str, Any]:
    """Return the constructor arguments that YAML may set, also those behind `**kwargs`, by name, each with its type."""
    try:
        arguments = constructor_parameters(cls)
    except Exception:  # a class that jsonargparse cannot read must not hide the first error
        return {}
    named = [argument for argument in arguments if not argument.kind.name.startswith("VAR_")]
    empty = inspect.Parameter.empty
    return {argument.name: None if argument.annotation is empty else argument.annotation for argument in named}


def members(hint: Any) -> list[Any]:
    """Return the members of a type, with unions and containers opened."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, list, tuple, set, collections.abc.Iterable, collections.abc.Sequence):
        return [inner for member in get_args(hint) for inner in members(member)]
    return [hint]


def class_bases(hint: Any) -> tuple[type, ...]:
    """Return the classes among the members of a type that YAML names by `class_path`, or by their fields."""
    return tuple(
        member
        for member in members(hint)
        if isinstance(member, type) and member not in PLAIN and member.__module__ not in ("builtins", "pathlib")
    )


def settings_group(hint: Any) -> type | None:
    """Return the dataclass that a type is, alone or beside None; None for other types."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    others = [option for option in options if option is not type(None)]
    return others[0] if len(others) == 1 and isinstance(others[0], type) and is_dataclass(others[0]) else None


def subclasses(bases: tuple[type, ...]) -> dict[str, type]:
    """Return the public classes imported so far that YAML can name for one of the bases, these included, by name."""
    classes: dict[str, type] = {}
    todo = list(bases)
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if not cls.__name__.startswith("_") and cls not in classes.values():
            classes.setdefault(cls.__name__, cls)
    return classes


def subclass_names(bases: tuple[type, ...]) -> list[str]:
    """Return the names that YAML can give for one of the bases, without those that Lightning ships for its tests."""
    return [
        name
        for name, cls in subclasses(bases).items()
        if cls not in bases and not cls.__module__.startswith("lightning.pytorch.demos") and not _is_internal(cls)
    ]


def listed_subclasses(bases: tuple[type, ...], folder: str = "") -> dict[str, type]:
    """Return the public subclasses that this package exports or that the user's own files define, by name.

    Args:
        bases: The base classes, which are not among the result.
        folder: The folder of this package whose classes are returned; empty for all folders.
    """
    return {
        name: cls
        for name, cls in subclasses(bases).items()
        if cls not in bases
        and not _is_internal(cls)
        and (cls.__module__.split(".")[1].startswith(folder) if _is_ours(cls) else not _is_installed(cls))
    }


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == __name__.split(".")[0]


def _is_internal(cls: type) -> bool:
    """Whether the class is one of this package that its folder does not export."""
    return _is_ours(cls) and not hasattr(sys.modules[".".join(cls.__module__.split(".")[:2])], cls.__name__)


def _is_installed(cls: type) -> bool:
    """Whether the class comes from an installed package or from Python, and not from the user's own files."""
    file = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<builtin>")
    return "site-packages" in file.parts or not file.is_file() or file.is_relative_to(sysconfig.get_path("stdlib"))


def find_class(name: str, bases: tuple[type, ...]) -> type | str:
    """Return the class with a name, or the end of an error message if there is none."""
    if "." not in name:
        return subclasses(bases).get(name) or did_you_mean(name, subclass_names(bases))
    module, _, last = name.rpartition(".")
    try:
        cls = getattr(import_module(module), last, None)
    except ImportError:
        return f"the module {module!r} cannot be imported."
    if not isinstance(cls, type):
        return did_you_mean(last, subclass_names(bases))
    return cls if issubclass(cls, bases) else f"it is not a {' or '.join(base.__name__ for base in bases)}."


def written_as(hint: Any, value: Any, is_class: bool) -> str:
    """Return what YAML holds for an argument.

    That is a `section`, a `class`, a `group` of settings, the `fields` of one of several groups, or a `plain` value.

    Args:
        hint: The argument's type; a dict of types for a section.
        value: The value.
        is_class: Whether a mapping stands for a class although it names none, since one was named before.
    """
    if isinstance(hint, dict):
        return "section"
    bases = class_bases(hint)
    by_keys = isinstance(value, dict) and ("class_path" in value or "init_args" in value or is_class)
    if settings_group(hint) is not None and not isinstance(value, str | None) and not by_keys:
        return "group"
    mappings = [member for member in members(hint) if member not in (str, type(None))]
    if len(mappings) > 1 and all(map(is_dataclass, mappings)) and isinstance(value, dict) and not by_keys:
        return "fields"
    # A dataclass is written as its fields, never by its name.
    by_name = isinstance(value, str) and str not in members(hint) and not all(map(is_dataclass, bases))
    return "class" if bases and (by_keys or by_name) else "plain"


def expected(hint: Any, value: Any) -> tuple[str, str] | None:
    """Return what is expected in place of a value, and the remedy, for messages; None if the value is accepted."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--x", type=hint)
        parser.parse_object({"x": value})
        return None
    except Exception as error:
        if "Unsupported type" in str(error):
            return None
    literals = [member for member in members(hint) if get_origin(member) is Literal]
    if choices := [str(choice) for literal in literals for choice in get_args(literal)]:
        return f"one of {', '.join(choices)}", did_you_mean(str(value), choices)
    return type_in_words(hint), "correct it."


def type_in_words(hint: Any) -> str:
    """Return a type as users write its values: `a whole number or null`."""
    if isinstance(hint, type) and get_origin(hint) is None:
        return _IN_WORDS.get(hint, hint.__name__)
    names = [type_in_words(member) for member in get_args(hint)]
    if get_origin(hint) in (list, collections.abc.Iterable, collections.abc.Sequence) and names:
        return f"a list of {names[0]}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(names)
    return str(hint).replace("typing.", "")
