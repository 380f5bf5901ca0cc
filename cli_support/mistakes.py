"""Why jsonargparse refused what was typed, in one sentence.

Its own message for a typo names neither the file nor the nearest valid name, and spends a paragraph on each member of a
union. So after a failed parse the typed values are checked again, one by one, against the types of the parser's
options, until the first wrong one is found. Nothing here runs when the parse succeeds, so nothing here can refuse it.
"""

import inspect
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from ..common import class_arguments
from ..common.class_arguments import CLASS_KEYS, class_bases, find_class, members, parameters
from ..common.names import did_you_mean
from ..common.private_api import constructor_parameters, option_type, parser_actions
from .command_line import Source, Typed, UsageError


def explain(error: Exception, typed: Typed, parser: ArgumentParser) -> str:
    """Return what is wrong with what was typed, in one sentence; else the parser's own words, shortened."""
    check = _Check(parser)
    sentences = (check.source(source) for source in typed.sources if not source.origin.endswith(".help"))
    words = " ".join(str(error).split())
    return _first(sentences) or check.missing(typed) or (words if len(words) <= 300 else f"{words[:297]}...")


def check_help(typed: Typed, parser: ArgumentParser) -> None:
    """Raise a UsageError if `--model.help` or its like names no class that exists."""
    hints = {action.dest: option_type(action) for action in parser_actions(parser)}
    for option in [source.origin for source in typed.sources if source.origin.endswith(".help")]:
        key = option.removeprefix("--").removesuffix(".help")
        bases = class_bases(hints.get(key))
        name = typed.lookup(f"{key}.help")
        if bases and name is None:
            known = ", ".join(sorted(class_arguments.own_subclasses(bases)))
            raise UsageError(f"{option} needs the name of a class{f': one of {known}' if known else ''}.")
        if bases and isinstance(found := find_class(str(name), bases), str):
            raise UsageError(f"There is no class {name!r} for {option}; {found}")


def check_sections(config: Namespace) -> None:
    """Raise an ArgumentError if a section is a plain value (`trainer: 3`), which jsonargparse accepts."""
    for key in ("trainer", "checkpoint", "last_checkpoint"):
        if not isinstance(config.get(key), Namespace):
            raise ArgumentError(None, f"{key} is {config.get(key)!r} where a section is expected.")


class _Check:
    """Checks the sources in order; remembers which class each key stands for. Each check returns a sentence or None."""

    def __init__(self, parser: ArgumentParser) -> None:
        self.options: dict[str, Any] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        self.classes: dict[str, type] = {}
        for action in parser_actions(parser):
            section, _, name = action.dest.partition(".")
            if not name:
                self.options[section] = option_type(action)
            elif not f".{name}".endswith(".help"):
                self.sections.setdefault(section, {})[name] = option_type(action)

    def source(self, source: Source) -> str | None:
        valid = sorted({*self.options, *self.sections} - {"help", "print_config"})
        return _first(self.section(key, value, valid, source) for key, value in source.tree.items())

    def section(self, key: str, value: Any, valid: list[str], source: Source) -> str | None:
        if key not in valid:
            return self.unknown(key, "", valid, source)
        hint = self.options.get(key)
        if class_bases(hint):
            return self.instance(key, hint, value, source)
        if key in self.sections:
            return self.arguments(key, self.sections[key], value, "", source)
        return None if key == "config" else self.value(key, hint, value, "", source)

    def arguments(self, key: str, valid: dict[str, Any], values: Any, owner: str, source: Source) -> str | None:
        """Check the arguments of a section, of a class or of a group of settings."""
        if not isinstance(values, dict):
            return f"{key!r}{source.place} holds {values!r} where a section of `argument: value` lines is expected."
        return _first(
            self.argument(f"{key}.{name}", valid[name], value, owner, source)
            if name in valid
            else self.unknown(name, f"{key}.", list(valid), source, owner)
            for name, value in values.items()
        )

    def argument(self, key: str, hint: Any, value: Any, owner: str, source: Source) -> str | None:
        """Check a value whose type may be a class to build, a group of settings, a list of such, or plain."""
        if isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value):
            return _first(self.argument(key, hint, item, owner, source) for item in value)
        group, bases = class_arguments.settings_group(hint), class_bases(hint)
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
            found = find_class(str(value["class_path"]), class_bases(hint))
            if isinstance(found, str):
                return f"There is no class {value['class_path']!r} for {key!r}{source.place}; {found}"
            self.classes[key] = found
        cls = self.classes.get(key)
        valid = parameters(cls) if cls else {}
        arguments = dict(value.get("init_args") or {})
        for name in [name for name in value if name not in CLASS_KEYS]:
            if source.kind == "option":
                arguments[name] = value[name]
            elif cls is not None and name in valid:
                return f"{key}.{name}{source.place} is an argument of {cls.__name__}: it belongs under init_args."
            else:
                return self.unknown(name, f"{key}.", [*CLASS_KEYS, *valid], source)
        if arguments and cls is None:
            first = next(iter(arguments))
            return f"{key}.init_args.{first}{source.place} is given, but no class is: add {key}.class_path."
        if cls is None or not valid:
            return None
        given = {name: arguments[name] for name in arguments if name not in (value.get("dict_kwargs") or {})}
        return self.arguments(f"{key}.init_args", valid, given, cls.__name__, source)

    def value(self, key: str, hint: Any, value: Any, owner: str, source: Source) -> str | None:
        """Check a number, a string or a choice by parsing it with jsonargparse."""
        if hint is None or class_arguments.accepts(hint, value):
            return None
        expects = f"but {owner} expects" if owner else "where the expected value is"
        who = f"{key}{source.place} is {value!r}, {expects}"
        literals = [member for member in members(hint) if get_origin(member) is Literal]
        if choices := [str(choice) for literal in literals for choice in get_args(literal)]:
            return f"{who} one of {', '.join(choices)}; {did_you_mean(str(value), choices)}"
        return f"{who} {class_arguments.type_in_words(hint)}."

    def unknown(self, name: Any, prefix: str, valid: list[str], source: Source, owner: str = "") -> str:
        of = f" of {owner}" if owner else ""
        for shown in (prefix, prefix.replace("init_args.", "")):  # the level may be left out
            if source.origin.startswith(f"--{shown}{name}"):
                return f"There is no option {source.origin!r}{of}; {did_you_mean(str(name), valid, f'--{shown}')}"
        return f"There is no key {f'{prefix}{name}'!r}{of} in {source.origin}; {did_you_mean(str(name), valid)}"

    def missing(self, typed: Typed) -> str | None:
        """Check that required classes and arguments were given."""
        for key in ("model", "data"):
            if key not in self.classes:
                known = ", ".join(sorted(class_arguments.subclass_names(class_bases(self.options[key]))))
                beside = Path(str(typed.lookup("ckpt_path"))).parent.parent / "config.yaml"
                hint = f" (the checkpoint's run has one in {beside})" if beside.is_file() else ""
                return f"No {key} was given: name one with --config{hint} or --{key}; known classes are {known}."
            for parameter in constructor_parameters(self.classes[key]):
                name = f"{key}.init_args.{parameter.name}"
                if parameter.default is inspect.Parameter.empty and not typed.is_given(name):
                    return f"{self.classes[key].__name__} needs the argument {name}, which was not given."
        return None


def _first(sentences: Iterable[str | None]) -> str | None:
    return next(filter(None, sentences), None)
