"""Explanation of parsing errors in one sentence.

The messages of jsonargparse name neither the file nor the nearest valid name, and have a paragraph for each member of a
union. After a failed parse, the given values are therefore checked again, one by one, against the types of the options
until the first invalid value is found. The check does not run if the parse succeeds, so it cannot refuse valid values.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from ...common import class_arguments
from ...common.class_arguments import CLASS_KEYS, class_bases, find_class, parameters
from ...common.errors import UserError
from ...common.names import did_you_mean
from ...common.private_api import constructor_parameters, option_type, parser_actions
from .typed_values import Source, Typed, at


def explain(error: Exception, typed: Typed, parser: ArgumentParser) -> str:
    """Return one sentence about the first invalid value, or the shortened message of the parser if there is none."""
    words = " ".join(str(error).split())
    try:
        GivenValues(_options(parser)).check_all(typed)
    except UserError as mistake:
        return str(mistake)
    origins = {at(source.tree, "model.class_path"): source.origin for source in typed.sources}
    origins.pop(None, None)
    if len(origins) > 1 and (group := re.search(r"Group '([\w.]+)' does not accept option", words)):
        classes = " and ".join(f"{str(name).rpartition('.')[2]} from {origin}" for name, origin in origins.items())
        differing = f"whose groups {group[1]!r} have different fields"
        return f"Expected one class for model, got {classes}, {differing}: name one of them."
    return words if len(words) <= 300 else f"{words[:297]}..."


def check_help(typed: Typed, parser: ArgumentParser) -> None:
    """Check that `--model.help` and similar options name an existing class.

    Raises:
        UserError: If no class is named, or the class does not exist.
    """
    hints = {f"--{action.dest}.help": option_type(action) for action in parser_actions(parser)}
    for option in [source.origin for source in typed.sources if source.origin in hints]:
        bases = class_bases(hints[option])
        name = typed.lookup(option.removeprefix("--"))
        if bases and name is None:
            names = ", ".join(sorted(class_arguments.listed_subclasses(bases)))
            raise UserError(f"Expected the name of a class after {option}, got none: use one of {names or 'your own'}.")
        if bases and isinstance(reason := find_class(str(name), bases), str):
            raise UserError(f"Expected a class for {option}, got {name!r}: {reason}")


def check_sections(config: Namespace) -> None:
    """Check that sections are no plain values, which jsonargparse accepts (`trainer: 3`).

    Raises:
        ArgumentError: If a section is a plain value.
    """
    for key in ("trainer", "checkpoint", "last_checkpoint"):
        if not isinstance(config.get(key), Namespace):
            raise ArgumentError(None, f"Expected a section for {key}, got {config.get(key)!r}: correct it.")


def _options(parser: ArgumentParser) -> dict[str, Any]:
    """Return the types of a subcommand's options by name; a section is a dict of the types of its options."""
    types: dict[str, Any] = {}
    for action in sorted(parser_actions(parser), key=lambda action: action.dest.count(".")):
        section, _, name = action.dest.partition(".")
        if not name and section not in ("help", "config", "print_config"):
            types[section] = option_type(action)
        elif name and not f".{name}".endswith(".help"):
            options = types.get(section)
            types[section] = {**(options if isinstance(options, dict) else {}), name: option_type(action)}
    return types


_CLASSES = ("model", "data")


class GivenValues:
    """Check values against the types of options and of the classes that earlier values name.

    All methods raise a UserError for the first invalid value.

    Args:
        options: Types by name; a section is a dict of the types of its options.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.source = Source("", {})
        self.classes: dict[str, type] = {}
        self.fields: dict[str, dict[str, str]] = {}  # of values with several kinds of fields: origins by name
        self.options = options

    def check_all(self, typed: Typed) -> None:
        """Check the values of all sources in order, and that required classes and arguments were given."""
        for source in [source for source in typed.sources if not source.origin.endswith(".help")]:
            self.source = source
            self.check("", self.options, source.tree)
        for key in _CLASSES:
            if key not in self.classes:
                names = ", ".join(sorted(class_arguments.subclass_names(class_bases(self.options[key]))))
                config = Path(str(typed.lookup("ckpt_path"))).parent.parent / "config.yaml"
                hint = f" (the checkpoint's run has one in {config})" if config.is_file() else ""
                raise UserError(
                    f"Expected a class for {key}, got none: name one with --config{hint} or --{key}; known classes are "
                    f"{names}."
                )
            for parameter in constructor_parameters(self.classes[key]):
                name = f"{key}.init_args.{parameter.name}"
                if parameter.default is inspect.Parameter.empty and not typed.is_given(name):
                    raise UserError(f"Expected the argument {name} of {self.classes[key].__name__}, got none: add it.")

    def check(self, key: str, hint: Any, value: Any, owner: str = "") -> None:
        """Check a value: a section, a class with arguments, a group of settings, a list of these, or a plain value.

        The owner is the class or group whose argument the value is; none for options of the Trainer.
        """
        if isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value):
            for item in value:
                self.check(key, hint, item, owner)
            return
        origin_phrase = self.source.phrase
        form = class_arguments.written_as(hint, value, key in (*_CLASSES, *self.classes))
        if form != "fields":
            self.fields.pop(key, None)
        if form == "plain":
            if hint is not None and (problem := class_arguments.expected(hint, value)):
                expected, remedy = problem
                of = f" of {owner}" if owner else ""
                raise UserError(f"Expected {expected} for {key}{of}{origin_phrase}, got {value!r}: {remedy}")
            return
        if form == "class":
            cls, value = self.instance(key, class_bases(hint), value)
            key = f"{key}.init_args"
            valid = parameters(cls) or dict.fromkeys(value)
            owner = cls.__name__
        elif form == "group":
            group = class_arguments.settings_group(hint) or object
            valid = parameters(group)
            owner = group.__name__
        elif form == "fields":
            group = self.kind_of_fields(key, class_bases(hint), value)
            valid = parameters(group)
            owner = group.__name__
        else:
            valid = hint
        if not isinstance(value, dict):
            raise UserError(f"Expected `argument: value` lines for {key!r}{origin_phrase}, got {value!r}: correct it.")
        for name, inner in value.items():
            if name not in valid:
                raise self.unknown(str(name), f"{key}." if key else "", list(valid), owner)
            self.check(f"{key}.{name}" if key else name, valid[name], inner, owner)

    def kind_of_fields(self, key: str, kinds: tuple[type, ...], value: dict[str, Any]) -> type:
        """Return the first of several kinds of fields that has all those which this source and earlier ones gave.

        An option of another kind replaces earlier fields, and a file does not.
        """
        known = list(dict.fromkeys(name for kind in kinds for name in parameters(kind)))
        if unknown := next((name for name in value if name not in known), None):
            raise self.unknown(str(unknown), f"{key}.", known)
        given = dict.fromkeys(value, self.source.origin)
        both = self.fields.get(key, {}) | given
        for origins in (both, given) if self.source.kind == "option" else (both,):
            if fitting := [kind for kind in kinds if origins.keys() <= parameters(kind).keys()]:
                self.fields[key] = origins
                return fitting[0]
        last = next(reversed(value))
        apart = (name for name in both if not any({name, last} <= parameters(kind).keys() for kind in kinds))
        other = next(apart, next(iter(both)))
        raise UserError(
            f"Expected fields of one kind for {key}, got {other!r} from {both[other]} and {last!r} from "
            f"{both[last]}, which exclude each other: leave one of them out, or give the second by options, which "
            "replace the first."
        )

    def instance(self, key: str, bases: tuple[type, ...], value: Any) -> tuple[type, dict[str, Any]]:
        """Return the class and the arguments that a value names: a name, or `{class_path: ..., init_args: {...}}`."""
        value = value if isinstance(value, dict) else {"class_path": value}
        origin_phrase = self.source.phrase
        if "class_path" in value:
            cls = find_class(str(value["class_path"]), bases)
            if isinstance(cls, str):
                raise UserError(f"Expected a class for {key!r}{origin_phrase}, got {value['class_path']!r}: {cls}")
            self.classes[key] = cls
        outside = {name: value[name] for name in value if name not in CLASS_KEYS}
        arguments = {**(value.get("init_args") or {}), **outside}
        if key not in self.classes:
            if not arguments:
                return object, {}
            first = next(iter(arguments))
            raise UserError(f"Expected {key}.class_path with {key}.init_args.{first}{origin_phrase}, got none: add it.")
        cls = self.classes[key]
        if outside and self.source.kind != "option":  # options may omit the level `init_args`
            name = next(iter(outside))
            if name not in parameters(cls):
                raise self.unknown(name, f"{key}.", [*CLASS_KEYS, *parameters(cls)])
            of = f"{name!r} of {cls.__name__}{origin_phrase}"
            raise UserError(f"Expected the argument {of} under {key}.init_args, got it under {key}: move it.")
        return cls, {name: arguments[name] for name in arguments if name not in (value.get("dict_kwargs") or {})}

    def unknown(self, name: str, prefix: str, valid: list[str], owner: str = "") -> UserError:
        """Return the error for an unknown option or key."""
        of = f" of {owner}" if owner else ""
        origin = self.source.origin
        for typed_prefix in (f"--{prefix}", f"--{prefix.replace('init_args.', '')}"):
            if origin.startswith(f"{typed_prefix}{name}"):
                return UserError(
                    f"Expected a known option{of}, got {origin!r}: {did_you_mean(name, valid, typed_prefix)}"
                )
        return UserError(
            f"Expected a known key{of} in {origin}, got {f'{prefix}{name}'!r}: {did_you_mean(name, valid)}"
        )
