"""Code that a checkpoint may name: classes of this package and of `torch.optim`, and names that the user typed.

A checkpoint's hyper-parameters name classes, and jsonargparse imports and calls every name: a file of tensors and plain
data could run any function. Therefore every name is looked up among the imported modules, and the object that it leads
to is checked: a path through this package may leave the package (`vlightning.x.os.system`).

The type of an argument decides what a string is. Where the type is text, it is text, whatever it says. Where the type
is a group of settings, jsonargparse would open the YAML file of this name, or import the class: a string is refused.
Where the type is a class or a function, only the name of an allowed class passes.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .class_arguments import CLASS_KEYS, class_bases, parameters, subclasses

# Name of the function that rebuilds the object, as Lightning writes it into a checkpoint.
INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
_PACKAGE = __name__.partition(".")[0]
_SCALARS = (str, int, float, bool, bytes, complex, type(None))
_SEQUENCES = (list, tuple, set, frozenset, Sequence, Iterable)


class ForeignCode(ValueError):
    """A file names code that is not allowed.

    Args:
        key: Place of the name, as in `init_args.eval_transform`; empty for the class itself.
        name: The name.
    """

    def __init__(self, key: str, name: str) -> None:
        super().__init__(f"{key or 'the class'} is {name!r}")
        self.key, self.name = key, name


class TypedNames:
    """The names that the user typed, which a checkpoint may name too.

    Typed classes are imported, as the parser would do later.
    """

    def __init__(self, trees: Sequence[Mapping[str, Any]] = ()) -> None:
        self.names = {name for tree in trees for name in _strings(tree)}
        for name in {name for tree in trees for name in _class_names(tree)}:
            if "." in name and _is_name(name):
                _import(name)

    def allow(self, name: str, cls: type | None, bases: tuple[type, ...]) -> bool:
        """Return whether this name, or another name of the same class, was typed."""
        if name in self.names:
            return True
        if cls is None:
            return False
        short = subclasses(bases) if bases else {cls.__name__: cls}
        return any((imported(typed) if "." in typed else short.get(typed)) is cls for typed in self.names)


def imported(path: str) -> type | None:
    """Return the class of a dotted path, if its module is imported and contains it.

    Nothing is imported or called but the public names of this package.
    """
    module, _, name = path.rpartition(".")
    if module not in sys.modules:
        return None
    of_package = module.partition(".")[0] == _PACKAGE  # whose packages import their public names at the first use
    value = getattr(sys.modules[module], name, None) if of_package else vars(sys.modules[module]).get(name)
    return value if isinstance(value, type) else None


def check_arguments(values: Mapping[str, Any], cls: type | None, typed: TypedNames, key: str = "init_args") -> Any:
    """Return the arguments of a class from a checkpoint, after a check of the code that they name.

    Args:
        values: The arguments, plain data.
        cls: The class, for the types of its arguments; None if unknown.
        typed: Names that the user typed.
        key: Place of the arguments, for the message.

    Returns:
        A copy in which classes have the names of their defining modules.

    Raises:
        ForeignCode: At the first name that is not allowed.
    """
    hints = parameters(cls) if cls is not None else {}
    for name in values:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
            raise ForeignCode(key, str(name))
    return {name: _check(value, hints.get(name), typed, f"{key}.{name}") for name, value in values.items()}


def check_class(name: Any, bases: tuple[type, ...], typed: TypedNames, key: str = "") -> tuple[str, type | None]:
    """Return a class that a checkpoint names, with the name by which the parser finds exactly this class.

    Args:
        name: A dotted path, or the name of an imported class.
        bases: Expected base classes; empty if unknown.
        typed: Names that the user typed.
        key: Place of the name, for the message.

    Returns:
        The name, and the class; None for a typed class that is not imported.

    Raises:
        ForeignCode: If the class is not allowed, or a file has this name: the parser would open it.
    """
    if not isinstance(name, str) or not _is_name(name) or Path(name).is_file():
        raise ForeignCode(key, name if isinstance(name, str) else repr(name))
    cls = imported(name) if "." in name else subclasses(bases).get(name)
    if cls is not None and defined_here(cls):
        return f"{cls.__module__}.{cls.__qualname__}", cls
    if typed.allow(name, cls, bases):
        if cls is None and "." in name:  # its arguments are checked by their types
            _import(name)
            cls = imported(name)
        return name, cls
    raise ForeignCode(key, name)


def check_described(
    described: Mapping[str, Any], base: type, typed: TypedNames, is_replaced: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """Return a class and its arguments from a checkpoint, after a check of the code that they name.

    Args:
        described: `{"class_path": ..., "init_args": {...}}`.
        base: Expected base class.
        typed: Names that the user typed.
        is_replaced: Whether another value replaces an argument, whose foreign code is then left out.

    Raises:
        ForeignCode: At the first name that is not allowed.
    """
    name, cls = check_class(described["class_path"], (base,), typed)
    arguments: dict[str, Any] = {}
    for argument, value in described["init_args"].items():
        try:
            arguments |= check_arguments({argument: value}, cls, typed)
        except ForeignCode:
            if not is_replaced(argument):
                raise
    return {"class_path": name, "init_args": arguments}


def defined_here(cls: type) -> bool:
    """Return whether this package defines a class, or `torch.optim` an optimizer or a scheduler."""
    defined = imported(f"{cls.__module__}.{cls.__qualname__}") is cls
    package, _, rest = cls.__module__.partition(".")
    of_optim = f"{package}.{rest.partition('.')[0]}" == "torch.optim"
    return defined and (
        package == _PACKAGE or (of_optim and issubclass(cls, (Optimizer, LRScheduler, ReduceLROnPlateau)))
    )


def _check(value: Any, hint: Any, typed: TypedNames, key: str) -> Any:
    """Return a value of any type, after a check of the names of code in it."""
    if isinstance(value, str):
        return _check_text(value, hint, typed, key)
    if isinstance(value, (list, tuple)):
        item = _item_type(_options(hint))
        return [_check(element, item, typed, f"{key}.{number}") for number, element in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    return (
        _check_class_mapping(value, hint, typed, key)
        if "class_path" in value
        else _check_mapping(value, hint, typed, key)
    )


def _check_text(value: str, hint: Any, typed: TypedNames, key: str) -> str:
    """Return a string; the first member of the type that would take it decides what it is."""
    options = _options(hint)
    if not _is_plain(hint):  # the parser reads YAML in a string
        from jsonargparse import get_loader  # here, since methods are used without the command line's libraries

        inside = None
        with contextlib.suppress(Exception):  # then it is no YAML for the parser either
            inside = get_loader("yaml")(value)
        if isinstance(inside, (dict, list)):
            _check(inside, hint, typed, key)
    for option in options:
        if _takes_text(option, value):
            return value
        if is_dataclass(option) or (_is_container(option) and not _is_plain(option)):
            raise ForeignCode(key, value)
        if _is_code(option):
            return check_class(value, class_bases(hint), typed, key)[0]
    return value


def _check_class_mapping(value: Mapping[Any, Any], hint: Any, typed: TypedNames, key: str) -> dict[str, Any]:
    """Return a mapping that names a class."""
    unknown = set(value) - set(CLASS_KEYS)
    if unknown:
        raise ForeignCode(key, str(min(unknown, key=str)))
    name, cls = check_class(value["class_path"], class_bases(hint), typed, key)
    checked: dict[str, Any] = {"class_path": name}
    for arguments in ("init_args", "dict_kwargs"):
        if value.get(arguments):
            checked[arguments] = check_arguments(value[arguments], cls, typed, f"{key}.{arguments}")
    return checked


def _check_mapping(value: Mapping[Any, Any], hint: Any, typed: TypedNames, key: str) -> dict[Any, Any]:
    """Return a mapping without the name of a class: fields of a group of settings, or any keys."""
    options = _options(hint)
    groups = [option for option in options if isinstance(option, type) and is_dataclass(option)]
    for name in map(str, value):
        # jsonargparse reads `a.class_path` as two levels, and uses `__path__` itself.
        if "class_path" in name.split(".") or name.startswith("__") or (groups and not name.isidentifier()):
            raise ForeignCode(key, name)
    mappings = [option for option in options if _is_mapping(option)]
    if not groups and not mappings and any(map(_is_code, options)):  # arguments of a class that is not named
        raise ForeignCode(key, str(dict(value)))
    if len(groups) == 1 and set(value) <= set(CLASS_KEYS):
        return {
            name: check_arguments(arguments or {}, groups[0], typed, f"{key}.{name}")
            for name, arguments in value.items()
        }
    types = [_field_types(group) for group in groups]
    types += [dict.fromkeys(value, get_args(mapping)[-1]) for mapping in mappings if get_args(mapping)]
    checked = dict(value)
    for name in checked:
        # Which of several groups is meant is not known: a value has to be right for each.
        for type_of_option in [of_option[name] for of_option in types if name in of_option] or [None]:
            checked[name] = _check(checked[name], type_of_option, typed, f"{key}.{name}")
    return checked


def _options(hint: Any) -> list[Any]:
    """Return the members of a union, without opening containers; empty if everything is allowed."""
    if get_origin(hint) in (Union, UnionType):
        options = [_options(member) for member in get_args(hint)]
        return [] if not all(options) else [member for of_member in options for member in of_member]
    if hasattr(hint, "__metadata__"):  # Annotated
        return _options(hint.__origin__)
    return [] if hint in (None, Any, object) else [hint]


def _item_type(options: Sequence[Any]) -> Any:
    """Return the type of the items of a list; None if everything is allowed."""
    items = [_args(option) for option in options if not _is_mapping(option) and _is_container(option)]
    return Union[tuple(member for members in items for member in members)] if items and all(items) else None  # noqa: UP007


def _args(container: Any) -> tuple[Any, ...]:
    return tuple(kind for kind in get_args(container) if kind is not Ellipsis)


def _is_mapping(member: Any) -> bool:
    origin = get_origin(member) or member
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_container(member: Any) -> bool:
    return (get_origin(member) or member) in _SEQUENCES or _is_mapping(member)


def _takes_text(member: Any, text: str) -> bool:
    """Return whether a member of a type takes a string as it is."""
    if get_origin(member) is Literal:
        return text in get_args(member)
    return isinstance(member, type) and issubclass(member, (str, os.PathLike))


def _is_plain(hint: Any) -> bool:
    """Return whether no value of a type can name code: text, numbers, choices, and containers of these."""
    options = _options(hint)
    return bool(options) and all(
        bool(_args(option)) and all(map(_is_plain, _args(option)))
        if _is_container(option)
        else not (is_dataclass(option) or _is_code(option))
        for option in options
    )


def _is_code(member: Any) -> bool:
    """Return whether a string would be imported for a member of a type: a class, a function, a type."""
    if member in _SCALARS or get_origin(member) is Literal or _is_container(member):
        return False
    if not isinstance(member, type) or get_origin(member) is not None or member is type:
        return True  # a callable, `type[X]`, and other types
    return not (is_dataclass(member) or issubclass(member, (Enum, os.PathLike, *_SCALARS[:-1])))


def _field_types(group: Any) -> dict[str, Any]:
    """Return the types of the fields of a group of settings."""
    hints = get_type_hints(group)
    return {field.name: hints.get(field.name) for field in fields(group)}


def _is_name(text: str) -> bool:
    """Return whether a string is written as the name of a class."""
    return all(word.isidentifier() for word in text.split("."))


def _import(name: str) -> None:
    """Import the module of a dotted name that the user typed."""
    with contextlib.suppress(Exception):  # the parser reports it
        importlib.import_module(name.rpartition(".")[0])


def _strings(tree: Any) -> Iterator[str]:
    """Yield all strings of a tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _strings(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _strings(value)


def _class_names(tree: Any, top: bool = True) -> Iterator[str]:
    """Yield the class names of a tree: every `class_path`, and `model` and `data` if they are strings."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if isinstance(value, str) and (name == "class_path" or (top and name in ("model", "data"))):
                yield value
            else:
                yield from _class_names(value, top=False)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _class_names(value, top=False)
