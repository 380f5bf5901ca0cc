"""Explanation of parsing errors in one sentence.

The messages of jsonargparse name neither the file nor the nearest valid name, and have a paragraph for each member of a
union. After a failed parse, the given values are therefore checked again, one by one, against the types of the options
until the first invalid value is found. The check does not run if the parse succeeds, so it cannot refuse valid values.
"""

import re
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from ...common import class_arguments
from ...common.class_arguments import class_bases, find_class
from ...common.errors import UserError
from ...common.private_api import option_type, parser_actions
from .given_values import GivenValues
from .typed_values import Typed, at


def explain(error: Exception, typed: Typed, parser: ArgumentParser) -> str:
    """Explain a parsing error.

    Args:
        error: The error of the parser.
        typed: The parts of the command line.
        parser: The parser of the subcommand.

    Returns:
        One sentence about the first invalid value, or the shortened message of the parser if none is found.
    """
    words = " ".join(str(error).split())
    try:
        GivenValues(_options(parser)).check_all(typed)
    except UserError as found:
        return str(found)
    named = {at(source.tree, "model.class_path"): source.origin for source in typed.sources}
    named.pop(None, None)
    if len(named) > 1 and (group := re.search(r"Group '([\w.]+)' does not accept option", words)):
        classes = " and ".join(f"{str(name).rpartition('.')[2]} from {origin}" for name, origin in named.items())
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
        bases, name = class_bases(hints[option]), typed.lookup(option.removeprefix("--"))
        if bases and name is None:
            known = ", ".join(sorted(class_arguments.own_subclasses(bases)))
            raise UserError(f"Expected the name of a class after {option}, got none: use one of {known or 'your own'}.")
        if bases and isinstance(found := find_class(str(name), bases), str):
            raise UserError(f"Expected a class for {option}, got {name!r}: {found}")


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
    found: dict[str, Any] = {}
    for action in sorted(parser_actions(parser), key=lambda action: action.dest.count(".")):
        section, _, name = action.dest.partition(".")
        if not name and section not in ("help", "config", "print_config"):
            found[section] = option_type(action)
        elif name and not f".{name}".endswith(".help"):
            options = found.get(section)
            found[section] = {**(options if isinstance(options, dict) else {}), name: option_type(action)}
    return found
