"""Why jsonargparse refused what was typed, in one sentence.

Its own message for a typo is a usage dump, or one paragraph for each member of a union, and names neither the file nor
the nearest valid name. So when a parse has failed, the typed values are walked again, beside the parser's own actions,
until the first one is found that cannot be right. Nothing here runs when the parse succeeds, so it can refuse nothing.
"""

import collections.abc
import importlib
import inspect
import sys
import sysconfig
import types
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from .typed import CLASS_KEYS, Source, Typed, UsageError, did_you_mean

PLAIN = (str, int, float, bool, bytes, list, tuple, dict, set, type(None), object)


def explain(error: Exception, typed: Typed, parser: ArgumentParser) -> str:
    """Say in one sentence what is wrong with what was typed.

    Args:
        error: What the parser raised.
        typed: What was typed.
        parser: The parser of the subcommand.

    Returns:
        The sentence; the parser's own words, shortened, where nothing better is found.
    """
    actions = {action.dest: getattr(action, "_typehint", action.type) for action in parser._actions}
    walk = _Walk(actions)
    for source in typed.sources:
        sentence = walk.source(source)
        if sentence:
            return sentence
    return walk.missing(typed) or _shorten(str(error))


def check_help(typed: Typed, parser: ArgumentParser) -> None:
    """Check that `--model.help` and its like name a class that there is.

    Args:
        typed: What was typed.
        parser: The parser of the subcommand.

    Raises:
        UsageError: If one does not.
    """
    hints = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    for source in typed.sources:
        key = source.origin.removeprefix("--").removesuffix(".help")
        bases = class_bases(hints.get(key))
        if source.kind != "option" or not source.origin.endswith(".help") or not bases:
            continue
        name = typed.lookup(f"{key}.help")
        if name is None:
            known = ", ".join(sorted(own_subclasses(bases)))
            raise UsageError(f"{source.origin} needs the name of a class{f': one of {known}' if known else ''}.")
        found = _find_class(str(name), bases)
        if isinstance(found, str):
            raise UsageError(f"There is no class {name!r} for {source.origin}; {found}")


def check_sections(config: Namespace) -> None:
    """Check what jsonargparse does not: that a section is not a number (`trainer: 3`).

    Args:
        config: The parsed configuration of the subcommand.

    Raises:
        ArgumentError: If one is.
    """
    for key in ("trainer", "checkpoint", "last_checkpoint"):
        if not isinstance(config.get(key), Namespace):
            raise ArgumentError(None, f"{key} is {config.get(key)!r} where a section is expected.")


class _Walk:
    """One pass over the sources; remembers which class each key stands for."""

    def __init__(self, actions: dict[str, Any]) -> None:
        self.actions = actions
        self.top = sorted({dest.split(".")[0] for dest in actions} - {"help", "print_config"})
        self.classes: dict[str, type] = {}
        self.given: dict[str, set[str]] = {}

    def source(self, source: Source) -> str | None:
        """First thing wrong with one source, or None."""
        for key, value in source.tree.items():
            if key.endswith(".help"):
                continue
            if key not in self.top:
                return self.unknown_key(key, "", self.top, source)
            hint = self.actions.get(key)
            group = [dest for dest in self.actions if dest.startswith(f"{key}.")]
            if class_bases(hint):
                sentence = self.instance(key, hint, value, source)
            elif group:
                sentence = self.group(key, value, source)
            else:
                sentence = None if key == "config" else self.plain(key, hint, value, "", source)
            if sentence:
                return sentence
        return None

    def group(self, key: str, value: Any, source: Source) -> str | None:
        """A section of fixed arguments: `trainer`, `checkpoint`."""
        if not isinstance(value, dict):
            return f"{key!r}{source.place} holds {value!r} where a section of `argument: value` lines is expected."
        valid = [dest[len(key) + 1 :] for dest in self.actions if dest.startswith(f"{key}.")]
        for name, content in value.items():
            if name not in valid:
                return self.unknown_key(name, f"{key}.", valid, source)
            sentence = self.argument(f"{key}.{name}", self.actions[f"{key}.{name}"], content, key, source)
            if sentence:
                return sentence
        return None

    def argument(self, key: str, hint: Any, value: Any, owner: str, source: Source) -> str | None:
        """A value whose type may be a class to build, a list of such, or plain."""
        if isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value):
            return next(filter(None, (self.argument(key, hint, item, owner, source) for item in value)), None)
        names_class = isinstance(value, dict) and ("class_path" in value or "init_args" in value or key in self.classes)
        bases = class_bases(hint)
        # A dataclass is written as its fields, never by its name.
        by_name = isinstance(value, str) and str not in members(hint) and not all(map(is_dataclass, bases))
        if bases and (names_class or by_name):
            return self.instance(key, hint, value, source)
        return self.plain(key, hint, value, owner, source)

    def instance(self, key: str, hint: Any, value: Any, source: Source) -> str | None:
        """A class to build: `ALBEFModule`, or `{class_path: ..., init_args: {...}}`."""
        bases = class_bases(hint)
        if isinstance(value, str) or value is None:
            value = {"class_path": value} if value else {}
        if not isinstance(value, dict):
            return f"{key!r}{source.place} holds {value!r} where a class name is expected, as in `class_path: Name`."
        if "class_path" in value:
            name = value["class_path"]
            found = _find_class(str(name), bases)
            if isinstance(found, str):
                return f"There is no class {name!r} for {key!r}{source.place}; {found}"
            if self.classes.get(key) is not found:
                self.given[key] = set()
            self.classes[key] = found
        arguments = dict(value.get("init_args") or {})
        for name, content in value.items():
            if name in CLASS_KEYS:
                continue
            cls = self.classes.get(key)
            if source.kind != "option":
                keys = [*CLASS_KEYS, *(_parameters(cls) if cls else {})]
                if cls and name in keys:
                    return f"{key}.{name}{source.place} is an argument of {cls.__name__}: it belongs under init_args."
                return self.unknown_key(name, f"{key}.", keys, source)
            arguments[name] = content
        if not arguments:
            return None
        cls = self.classes.get(key)
        if cls is None:
            first = next(iter(arguments))
            return f"{key}.init_args.{first}{source.place} is given, but no class is: add {key}.class_path."
        valid = _parameters(cls)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()) and not valid
        for name, content in arguments.items():
            if name not in valid:
                if open_ended or name in (value.get("dict_kwargs") or {}):
                    continue
                return self.unknown_key(name, f"{key}.init_args.", list(valid), source, cls.__name__)
            self.given.setdefault(key, set()).add(name)
            sentence = self.argument(f"{key}.init_args.{name}", valid[name], content, cls.__name__, source)
            if sentence:
                return sentence
        return None

    def plain(self, key: str, hint: Any, value: Any, owner: str, source: Source) -> str | None:
        """A number, a string, a choice: asks jsonargparse itself whether the type takes the value."""
        if hint is None or _accepts(hint, value):
            return None
        who = f"but {owner} expects" if owner and owner[0].isupper() else "where the expected value is"
        choices = [
            str(choice) for member in members(hint) if get_origin(member) is Literal for choice in get_args(member)
        ]
        if choices:
            return f"{key}{source.place} is {value!r}, {who} one of {', '.join(choices)}; " + did_you_mean(
                str(value), choices
            )
        return f"{key}{source.place} is {value!r}, {who} {_type_name(hint)}."

    def unknown_key(self, name: str, prefix: str, valid: list[str], source: Source, cls: str | None = None) -> str:
        """The sentence for a key that nothing accepts."""
        owner = f" of {cls}" if cls else ""
        if source.kind == "option":
            return f"There is no option {source.origin!r}{owner}; {_option_hint(name, prefix, valid, source.origin)}"
        return f"There is no key {prefix + str(name)!r}{owner}{source.place}; {did_you_mean(str(name), valid)}"

    def missing(self, typed: Typed) -> str | None:
        """A required class or argument that was not given."""
        for key in ("model", "data"):
            if key not in self.actions:
                continue
            if key not in self.classes:
                known = ", ".join(sorted(_subclass_names(class_bases(self.actions[key]))))
                beside = Path(str(typed.lookup("ckpt_path"))).parent.parent / "config.yaml"
                hint = f" (the checkpoint's run has one in {beside})" if beside.is_file() else ""
                return f"No {key} was given: name one with --config{hint} or --{key}; known classes are {known}."
            for name, parameter in inspect.signature(self.classes[key]).parameters.items():
                optional = parameter.default is not parameter.empty or parameter.kind in (
                    parameter.VAR_KEYWORD,
                    parameter.VAR_POSITIONAL,
                )
                if not optional and name not in self.given.get(key, set()):
                    cls = self.classes[key].__name__
                    return f"{cls} needs the argument {key}.init_args.{name}, which was not given."
        return None


def _option_hint(name: str, prefix: str, valid: list[str], origin: str) -> str:
    short = origin == f"--{prefix.removesuffix('init_args.')}{name}"  # the init_args level was left out
    shown = prefix.removesuffix("init_args.") if short else prefix
    hint = did_you_mean(name, valid)
    return hint.replace("did you mean '", f"did you mean '--{shown}")


def members(hint: Any) -> list[Any]:
    """Members of a type, unions and containers opened."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return [inner for member in get_args(hint) for inner in members(member)]
    if origin in (list, tuple, set, collections.abc.Iterable, collections.abc.Sequence):
        return [inner for member in get_args(hint) for inner in members(member)]
    return [hint]


def class_bases(hint: Any) -> tuple[type, ...]:
    """Classes among the members of a type that YAML would name by `class_path`."""
    return tuple(
        member
        for member in members(hint)
        if isinstance(member, type) and member not in PLAIN and member.__module__ not in ("builtins", "pathlib")
    )


def subclasses(bases: tuple[type, ...]) -> dict[str, type]:
    """Public classes imported so far that YAML can name for one of the bases, by short name.

    Args:
        bases: The bases, which are among them.
    """
    found: dict[str, type] = {}
    todo = list(bases)
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if not cls.__name__.startswith("_") and cls not in found.values():
            found.setdefault(cls.__name__, cls)
    return found


def _subclass_names(bases: tuple[type, ...]) -> list[str]:
    """Names to choose from; for `model` and `data`, not those that Lightning ships for its tests."""
    return [
        name
        for name, cls in subclasses(bases).items()
        if cls not in bases and not cls.__module__.startswith("lightning.pytorch.demos") and not _is_internal(cls)
    ]


def own_subclasses(bases: tuple[type, ...]) -> dict[str, type]:
    """Those of `subclasses` that are neither a base, nor internal to this package, nor of another installed package.

    Args:
        bases: The bases.
    """
    return {
        name: cls
        for name, cls in subclasses(bases).items()
        if cls not in bases and not _is_internal(cls) and (_is_ours(cls) or not _is_installed(cls))
    }


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "vlightning"


def _is_internal(cls: type) -> bool:
    """Whether the class is one of this package that its folder does not export, a base of others."""
    return _is_ours(cls) and not hasattr(sys.modules[".".join(cls.__module__.split(".")[:2])], cls.__name__)


def _is_installed(cls: type) -> bool:
    """Whether the class comes from an installed package, or from Python, and not from the user's own files."""
    file = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<builtin>")
    return "site-packages" in file.parts or not file.is_file() or file.is_relative_to(sysconfig.get_path("stdlib"))


def _find_class(name: str, bases: tuple[type, ...]) -> type | str:
    """The class of that name, or the end of a sentence that says what was meant."""
    known = subclasses(bases)
    if "." not in name:
        return known.get(name) or did_you_mean(name, _subclass_names(bases))
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last, None)
    except ImportError:
        return f"the module {module!r} cannot be imported."
    if isinstance(found, type):
        if issubclass(found, bases):
            return found
        return f"it is no {' or '.join(base.__name__ for base in bases)}."
    return did_you_mean(last, _subclass_names(bases))


def _parameters(cls: type) -> dict[str, Any]:
    """Constructor arguments that YAML may set, with their types; those behind `**kwargs` included."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(cls, "x", fail_untyped=False)
    except Exception:  # a class that jsonargparse cannot read must not hide the first error
        return {}
    return {
        action.dest[2:]: getattr(action, "_typehint", action.type)
        for action in parser._actions
        if action.dest.startswith("x.") and "." not in action.dest[2:]
    }


def _accepts(hint: Any, value: Any) -> bool:
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--x", type=hint)
        parser.parse_object({"x": value})
    except Exception as error:
        return "Unsupported type" in str(error)
    return True


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and get_origin(hint) is None:
        return {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}.get(
            hint.__name__, hint.__name__
        )
    members = [_type_name(member) for member in get_args(hint)]
    if get_origin(hint) in (list, collections.abc.Iterable, collections.abc.Sequence) and members:
        return f"a list of {members[0]}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(name.replace("NoneType", "null") for name in members)
    return str(hint).replace("typing.", "")


def _shorten(message: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(message.split())
    return line if len(line) <= 300 else f"{line[:297]}..."
