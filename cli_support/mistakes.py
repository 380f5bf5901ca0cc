"""Why jsonargparse refused what was typed, in one sentence.

Its own message for a typo names neither the file nor the nearest valid name, and spends a paragraph on each member of a
union. So after a failed parse the typed values are checked again, one by one, against the types of the parser's
options, until the first wrong one is found. Nothing here runs when the parse succeeds, so nothing here can refuse it.
"""

import collections.abc
import importlib
import inspect
import types
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from ..common.class_arguments import (
    CLASS_KEYS,
    class_bases,
    members,
    own_subclasses,
    parameters,
    settings_group,
    subclass_names,
    subclasses,
)
from ..common.names import did_you_mean
from ..common.private_api import constructor_parameters, option_type, parser_actions
from .command_line import Source, Typed, UsageError

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def explain(error: Exception, typed: Typed, parser: ArgumentParser) -> str:
    """Return what is wrong with what was typed, in one sentence; else the parser's own words, shortened.

    Args:
        error: What the parser raised.
        typed: What was typed.
        parser: The parser of the subcommand.
    """
    check = _Check(parser)
    for source in typed.sources:
        if not source.origin.endswith(".help") and (sentence := check.source(source)):
            return sentence
    words = " ".join(str(error).split())
    return check.missing(typed) or (words if len(words) <= 300 else f"{words[:297]}...")


def check_help(typed: Typed, parser: ArgumentParser) -> None:
    """Check that `--model.help` and its like name a class that exists.

    Args:
        typed: What was typed.
        parser: The parser of the subcommand.

    Raises:
        UsageError: If one does not.
    """
    hints = {action.dest: option_type(action) for action in parser_actions(parser)}
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
    """Check that sections are no plain values (`trainer: 3`), which jsonargparse accepts.

    Args:
        config: The parsed configuration of the subcommand.

    Raises:
        ArgumentError: If one is.
    """
    for key in ("trainer", "checkpoint", "last_checkpoint"):
        if not isinstance(config.get(key), Namespace):
            raise ArgumentError(None, f"{key} is {config.get(key)!r} where a section is expected.")


class _Check:
    """Checks the sources in order; remembers which class each key stands for."""

    def __init__(self, parser: ArgumentParser) -> None:
        self.options: dict[str, Any] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        for action in parser_actions(parser):
            section, _, name = action.dest.partition(".")
            if not name:
                self.options[section] = option_type(action)
            elif name != "help" and not name.endswith(".help"):
                self.sections.setdefault(section, {})[name] = option_type(action)
        self.classes: dict[str, type] = {}

    def source(self, source: Source) -> str | None:
        """Return the first mistake in one source, or None."""
        valid = sorted({*self.options, *self.sections} - {"help", "print_config"})
        for key, value in source.tree.items():
            if key not in valid:
                return self.unknown(key, "", valid, source)
            hint = self.options.get(key)
            if class_bases(hint):
                sentence = self.instance(key, hint, value, source)
            elif key in self.sections:
                sentence = self.arguments(key, self.sections[key], value, key, source)
            else:
                sentence = None if key == "config" else self.value(key, hint, value, "", source)
            if sentence:
                return sentence
        return None

    def arguments(self, key: str, valid: dict[str, Any], values: Any, owner: str, source: Source) -> str | None:
        """Check the arguments of a section, of a class or of a group of settings."""
        if not isinstance(values, dict):
            return f"{key!r}{source.place} holds {values!r} where a section of `argument: value` lines is expected."
        for name, content in values.items():
            if name not in valid:
                return self.unknown(name, f"{key}.", list(valid), source, owner if owner != key else "")
            if sentence := self.argument(f"{key}.{name}", valid[name], content, owner, source):
                return sentence
        return None

    def argument(self, key: str, hint: Any, value: Any, owner: str, source: Source) -> str | None:
        """Check a value whose type may be a class to build, a group of settings, a list of such, or plain."""
        if isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value):
            return next(filter(None, (self.argument(key, hint, item, owner, source) for item in value)), None)
        group, bases = settings_group(hint), class_bases(hint)
        names_class = isinstance(value, dict) and ("class_path" in value or "init_args" in value or key in self.classes)
        if group is not None and not isinstance(value, str | None) and not names_class:
            return self.arguments(key, parameters(group), value, group.__name__, source)
        # A dataclass is written as its fields, never by its name.
        by_name = isinstance(value, str) and str not in members(hint) and not all(map(is_dataclass, bases))
        if bases and (names_class or by_name):
            return self.instance(key, hint, value, source)
        return self.value(key, hint, value, owner, source)

    def instance(self, key: str, hint: Any, value: Any, source: Source) -> str | None:
        """Check a class to build: `ALBEFModule`, or `{class_path: ..., init_args: {...}}`."""
        if isinstance(value, str) or value is None:
            value = {"class_path": value} if value else {}
        if not isinstance(value, dict):
            return f"{key!r}{source.place} holds {value!r} where a class name is expected, as in `class_path: Name`."
        if "class_path" in value:
            found = _find_class(str(value["class_path"]), class_bases(hint))
            if isinstance(found, str):
                return f"There is no class {value['class_path']!r} for {key!r}{source.place}; {found}"
            self.classes[key] = found
        cls = self.classes.get(key)
        valid = parameters(cls) if cls else {}
        arguments = dict(value.get("init_args") or {})
        for name in [name for name in value if name not in CLASS_KEYS]:
            if source.kind == "option":
                arguments[name] = value[name]
            elif name in valid:
                return f"{key}.{name}{source.place} is an argument of {cls.__name__}: it belongs under init_args."
            else:
                return self.unknown(name, f"{key}.", [*CLASS_KEYS, *valid], source)
        if not arguments or (cls is not None and not valid):
            return None
        if cls is None:
            first = next(iter(arguments))
            return f"{key}.init_args.{first}{source.place} is given, but no class is: add {key}.class_path."
        given = {name: arguments[name] for name in arguments if name not in (value.get("dict_kwargs") or {})}
        return self.arguments(f"{key}.init_args", valid, given, cls.__name__, source)

    def value(self, key: str, hint: Any, value: Any, owner: str, source: Source) -> str | None:
        """Check a number, a string or a choice by parsing it with jsonargparse."""
        if hint is None or _accepts(hint, value):
            return None
        who = f"but {owner} expects" if owner and owner[0].isupper() else "where the expected value is"
        literals = [member for member in members(hint) if get_origin(member) is Literal]
        choices = [str(choice) for literal in literals for choice in get_args(literal)]
        if choices:
            hint = did_you_mean(str(value), choices)
            return f"{key}{source.place} is {value!r}, {who} one of {', '.join(choices)}; {hint}"
        return f"{key}{source.place} is {value!r}, {who} {_type_name(hint)}."

    def unknown(self, name: Any, prefix: str, valid: list[str], source: Source, owner: str = "") -> str:
        """Return the sentence for a key that does not exist."""
        of = f" of {owner}" if owner else ""
        for shown in (prefix, prefix.replace("init_args.", "")):  # the level may be left out
            if source.origin.startswith(f"--{shown}{name}"):
                return f"There is no option {source.origin!r}{of}; {did_you_mean(str(name), valid, f'--{shown}')}"
        return f"There is no key {f'{prefix}{name}'!r}{of} in {source.origin}; {did_you_mean(str(name), valid)}"

    def missing(self, typed: Typed) -> str | None:
        """Return the sentence for a required class or argument that was not given, or None."""
        for key in ("model", "data"):
            if key not in self.options:
                continue
            if key not in self.classes:
                known = ", ".join(sorted(subclass_names(class_bases(self.options[key]))))
                beside = Path(str(typed.lookup("ckpt_path"))).parent.parent / "config.yaml"
                hint = f" (the checkpoint's run has one in {beside})" if beside.is_file() else ""
                return f"No {key} was given: name one with --config{hint} or --{key}; known classes are {known}."
            for parameter in constructor_parameters(self.classes[key]):
                name = f"{key}.init_args.{parameter.name}"
                if parameter.default is inspect.Parameter.empty and not typed.is_given(name):
                    return f"{self.classes[key].__name__} needs the argument {name}, which was not given."
        return None


def _find_class(name: str, bases: tuple[type, ...]) -> type | str:
    """Return the class of that name, or the end of a sentence about the nearest one."""
    if "." not in name:
        return subclasses(bases).get(name) or did_you_mean(name, subclass_names(bases))
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last, None)
    except ImportError:
        return f"the module {module!r} cannot be imported."
    if not isinstance(found, type):
        return did_you_mean(last, subclass_names(bases))
    return found if issubclass(found, bases) else f"it is no {' or '.join(base.__name__ for base in bases)}."


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
        return _TYPE_NAMES.get(hint, hint.__name__)
    names = [_type_name(member) for member in get_args(hint)]
    if get_origin(hint) in (list, collections.abc.Iterable, collections.abc.Sequence) and names:
        return f"a list of {names[0]}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(names)
    return str(hint).replace("typing.", "")
