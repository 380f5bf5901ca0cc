"""Code that a checkpoint may name: classes of this package and of `torch.optim`, and names that the user typed.

A checkpoint's hyper-parameters name classes, and jsonargparse imports and calls every name: a file of tensors and plain
data could run any function. Therefore every name is looked up among the imported modules, and the object that it leads
to is checked: a path through this package may leave the package (`vlightning.x.os.system`).
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.machinery import PathFinder
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .class_arguments import CLASS_KEYS, PLAIN, class_bases, members, parameters, subclasses

# Name of the function that rebuilds the object, as Lightning writes it into a checkpoint.
INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
_PACKAGE = __name__.partition(".")[0]


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

    Args:
        trees: Typed options and YAML files as nested dicts.
    """

    def __init__(self, trees: Sequence[Mapping[str, Any]] = ()) -> None:
        self.names = {name for tree in trees for name in _strings(tree)}
        for name in {name for tree in trees for name in _class_names(tree)}:
            if "." in name and all(part.isidentifier() for part in name.split(".")):
                try:
                    importlib.import_module(name.rpartition(".")[0])
                except Exception:  # the parser reports it
                    continue

    def allow(self, name: str, found: type | None, bases: tuple[type, ...]) -> bool:
        """Return whether this name, or another name of the same class, was typed."""
        if name in self.names:
            return True
        if found is None:
            return False
        short = subclasses(bases) if bases else {found.__name__: found}
        return any((imported(typed) if "." in typed else short.get(typed)) is found for typed in self.names)


def imported(path: str) -> type | None:
    """Return the class of a dotted path, if its module is imported and contains it.

    Nothing is imported or called but the public names of this package.
    """
    module, _, name = path.rpartition(".")
    if module not in sys.modules:
        return None
    own = module.partition(".")[0] == _PACKAGE  # whose packages import their public names at the first use
    found = getattr(sys.modules[module], name, None) if own else vars(sys.modules[module]).get(name)
    return found if isinstance(found, type) else None


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
        # jsonargparse reads `a.class_path` as two levels, and uses `__path__` itself.
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
        ForeignCode: If the class is not allowed.
    """
    if not isinstance(name, str):
        raise ForeignCode(key, repr(name))
    found = imported(name) if "." in name else subclasses(bases).get(name)
    if found is not None and defined_here(found):
        return f"{found.__module__}.{found.__qualname__}", found
    if typed.allow(name, found, bases):
        return name, found
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


def defined_here(found: type) -> bool:
    """Return whether this package defines a class, or `torch.optim` an optimizer or a scheduler.

    Args:
        found: The class.
    """
    defined = imported(f"{found.__module__}.{found.__qualname__}") is found
    package, _, rest = found.__module__.partition(".")
    of_optim = f"{package}.{rest.partition('.')[0]}" == "torch.optim"
    return defined and (
        package == _PACKAGE or (of_optim and issubclass(found, (Optimizer, LRScheduler, ReduceLROnPlateau)))
    )


def _check(value: Any, hint: Any, typed: TypedNames, key: str) -> Any:
    """Check a value of any type: refuse names of code, also in the YAML of a string."""
    if isinstance(value, str):
        return _check_text(value, hint, typed, key)
    if isinstance(value, (list, tuple)):
        return [_check(item, hint, typed, key) for item in value]
    if not isinstance(value, Mapping):
        return value
    members = _opened(hint)
    bases = tuple(member for member in class_bases(hint) if member in members) if hint is not None else ()
    if "class_path" not in value:
        inner = {name: kind for base in bases for name, kind in _inner(base).items()}
        for name in value:
            if "class_path" in str(name).split(".") or str(name).startswith("__"):
                raise ForeignCode(key, str(name))
        if set(value) <= set(CLASS_KEYS) and len(bases) == 1:  # of the only class of the type
            return {name: check_arguments(dict(part or {}), bases[0], typed, key) for name, part in value.items()}
        rest = next((member for member in members if _is_mapping(member)), None)
        every = get_args(rest)[-1] if get_args(rest) else None
        return {name: _check(part, inner.get(name, every), typed, f"{key}.{name}") for name, part in value.items()}
    unknown = set(value) - set(CLASS_KEYS)
    if unknown:
        raise ForeignCode(key, str(min(unknown)))
    name, cls = check_class(value["class_path"], bases, typed, key)
    checked: dict[str, Any] = {"class_path": name}
    for part in ("init_args", "dict_kwargs"):
        if value.get(part):
            checked[part] = check_arguments(value[part], cls, typed, f"{key}.{part}")
    return checked


def _check_text(value: str, hint: Any, typed: TypedNames, key: str) -> str:
    try:
        inside = yaml.safe_load(value)
    except yaml.YAMLError:
        inside = None
    if isinstance(inside, (dict, list)):
        _check(inside, hint, typed, key)
    members = _opened(hint)
    if any(get_origin(member) is Literal and value in get_args(member) for member in members):
        return value
    if any(_is_code(member) for member in members):
        return check_class(value, class_bases(hint), typed, key)[0]
    # For a dataclass jsonargparse tries a string as a class, and imports its module.
    module = value.rpartition(".")[0]
    if any(is_dataclass(member) for member in members) and all(part.isidentifier() for part in value.split(".")):
        new = module != "" and module not in sys.modules
        if new and PathFinder.find_spec(module.partition(".")[0]) is not None:
            raise ForeignCode(key, value)
    return value


def _opened(hint: Any) -> list[Any]:
    """Return the members of a type; empty if everything is allowed."""
    return [] if hint is None or hint is Any else members(hint)


def _is_mapping(member: Any) -> bool:
    origin = get_origin(member) or member
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_code(member: Any) -> bool:
    """Return whether a string would be imported for a member of a type: a class, a function, a type."""
    if member in (*PLAIN, Any) or get_origin(member) is Literal or _is_mapping(member):
        return False
    if not isinstance(member, type) or get_origin(member) is not None or member is type:
        return True  # a callable, `type[X]`, and other types
    return not (is_dataclass(member) or issubclass(member, (Enum, os.PathLike)))


def _inner(base: type) -> dict[str, Any]:
    """Return the types of the fields of a class."""
    if is_dataclass(base):
        hints = get_type_hints(base)
        return {one.name: hints.get(one.name) for one in fields(base)}
    return {} if inspect.isabstract(base) else parameters(base)


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
