"""Why jsonargparse refused what was typed, in one sentence.

Its own message for a typo names neither the file nor the nearest valid name, and spends a paragraph on each member of a
union. So after a failed parse the typed values are checked again, one by one, against the types of the parser's
options, until the first wrong one is found. Nothing here runs when the parse succeeds, so nothing here can refuse it.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from ..common import class_arguments
from ..common.class_arguments import CLASS_KEYS, class_bases, find_class, parameters
from ..common.errors import UserError
from ..common.names import did_you_mean
from ..common.private_api import constructor_parameters, option_type, parser_actions
from ..common.typed_values import Source, Typed, at

_CLASSES = ("model", "data")


def explain(error: Exception, typed: Typed, parser: ArgumentParser) -> str:
    """Return what is wrong with what was typed, in one sentence; else the parser's own words, shortened."""
    words = " ".join(str(error).split())
    try:
        _Check(parser).all(typed)
    except UserError as found:
        return str(found)
    named = {at(source.tree, "model.class_path"): source.origin for source in typed.sources}
    named.pop(None, None)
    if len(named) > 1 and (group := re.search(r"Group '([\w.]+)' does not accept option", words)):
        classes = " and ".join(f"{str(name).rpartition('.')[2]} by {origin}" for name, origin in named.items())
        return f"model is {classes}, which have a group {group[1]!r} with other fields: name one of the two classes."
    return words if len(words) <= 300 else f"{words[:297]}..."


def check_help(typed: Typed, parser: ArgumentParser) -> None:
    """Raise a UserError if `--model.help` or its like names no class that exists."""
    hints = {f"--{action.dest}.help": option_type(action) for action in parser_actions(parser)}
    for option in [source.origin for source in typed.sources if source.origin in hints]:
        bases, name = class_bases(hints[option]), typed.lookup(option.removeprefix("--"))
        if bases and name is None:
            known = ", ".join(sorted(class_arguments.own_subclasses(bases)))
            raise UserError(f"{option} needs the name of a class{f': one of {known}' if known else ''}.")
        if bases and isinstance(found := find_class(str(name), bases), str):
            raise UserError(f"There is no class {name!r} for {option}; {found}")


def check_sections(config: Namespace) -> None:
    """Raise an ArgumentError if a section is a plain value (`trainer: 3`), which jsonargparse accepts."""
    for key in ("trainer", "checkpoint", "last_checkpoint"):
        if not isinstance(config.get(key), Namespace):
            raise ArgumentError(None, f"{key} is {config.get(key)!r} where a section is expected.")


class _Check:
    """Checks values against the types of a parser's options and the classes named so far; raises at the first mistake.

    Args:
        parser: The parser of a subcommand.
    """

    def __init__(self, parser: ArgumentParser) -> None:
        self.source = Source("", {})
        self.classes: dict[str, type] = {}
        # Types by name; the options of a section stand in a dict of their own.
        self.options: dict[str, Any] = {}
        for action in sorted(parser_actions(parser), key=lambda action: action.dest.count(".")):
            section, _, name = action.dest.partition(".")
            if not name and section not in ("help", "config", "print_config"):
                self.options[section] = option_type(action)
            elif name and not f".{name}".endswith(".help"):
                options = self.options.get(section)
                self.options[section] = {**(options if isinstance(options, dict) else {}), name: option_type(action)}

    def all(self, typed: Typed) -> None:
        """Check the sources in order, then that required classes and arguments were given."""
        for source in [source for source in typed.sources if not source.origin.endswith(".help")]:
            self.source = source
            self.check("", self.options, source.tree)
        for key in _CLASSES:
            if key not in self.classes:
                known = ", ".join(sorted(class_arguments.subclass_names(class_bases(self.options[key]))))
                beside = Path(str(typed.lookup("ckpt_path"))).parent.parent / "config.yaml"
                hint = f" (the checkpoint's run has one in {beside})" if beside.is_file() else ""
                raise UserError(
                    f"No {key} was given: name one with --config{hint} or --{key}; known classes are {known}."
                )
            for parameter in constructor_parameters(self.classes[key]):
                name = f"{key}.init_args.{parameter.name}"
                if parameter.default is inspect.Parameter.empty and not typed.is_given(name):
                    raise UserError(f"{self.classes[key].__name__} needs the argument {name}, which was not given.")

    def check(self, key: str, hint: Any, value: Any, owner: str = "") -> None:
        """Check a section, a class to build, a group of settings, a list of such, or a plain value."""
        if isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value):
            for item in value:
                self.check(key, hint, item, owner)
            return
        place = self.source.place
        form = class_arguments.written_as(hint, value, key in (*_CLASSES, *self.classes))
        if form == "plain":
            if hint is not None and (expected := class_arguments.expected(hint, value)):
                who = f"but {owner} expects" if owner else "where the expected value is"
                raise UserError(f"{key}{place} is {value!r}, {who} {expected}")
            return
        if form == "class":
            cls, value = self.instance(key, class_bases(hint), value)
            key, valid, owner = f"{key}.init_args", parameters(cls) or dict.fromkeys(value), cls.__name__
        elif form == "group":
            group = class_arguments.settings_group(hint) or object
            valid, owner = parameters(group), group.__name__
        else:
            valid = hint
        if not isinstance(value, dict):
            what = "where a section of `argument: value` lines is expected"
            raise UserError(f"{key!r}{place} holds {value!r} {what}.")
        for name, inner in value.items():
            if name not in valid:
                raise self.unknown(str(name), f"{key}." if key else "", list(valid), owner)
            self.check(f"{key}.{name}" if key else name, valid[name], inner, owner)

    def instance(self, key: str, bases: tuple[type, ...], value: Any) -> tuple[type, dict[str, Any]]:
        """Return the class to build, and its arguments, of its name or `{class_path: ..., init_args: {...}}`."""
        value, place = value if isinstance(value, dict) else {"class_path": value}, self.source.place
        if "class_path" in value:
            found = find_class(str(value["class_path"]), bases)
            if isinstance(found, str):
                raise UserError(f"There is no class {value['class_path']!r} for {key!r}{place}; {found}")
            self.classes[key] = found
        beside = {name: value[name] for name in value if name not in CLASS_KEYS}
        arguments = {**(value.get("init_args") or {}), **beside}
        if key not in self.classes:
            if not arguments:
                return object, {}
            first = next(iter(arguments))
            raise UserError(f"{key}.init_args.{first}{place} is given, but no class is: add {key}.class_path.")
        cls = self.classes[key]
        if beside and self.source.kind != "option":  # options may leave the level out
            name = next(iter(beside))
            if name not in parameters(cls):
                raise self.unknown(name, f"{key}.", [*CLASS_KEYS, *parameters(cls)])
            raise UserError(f"{key}.{name}{place} is an argument of {cls.__name__}: it belongs under init_args.")
        return cls, {name: arguments[name] for name in arguments if name not in (value.get("dict_kwargs") or {})}

    def unknown(self, name: str, prefix: str, valid: list[str], owner: str = "") -> UserError:
        of, origin = f" of {owner}" if owner else "", self.source.origin
        for shown in (prefix, prefix.replace("init_args.", "")):
            if origin.startswith(f"--{shown}{name}"):
                return UserError(f"There is no option {origin!r}{of}; {did_you_mean(name, valid, f'--{shown}')}")
        return UserError(f"There is no key {f'{prefix}{name}'!r}{of} in {origin}; {did_you_mean(name, valid)}")
