"""What the user typed: the command line and its YAML files, key by key, each value with its origin.

jsonargparse merges everything into one namespace with the defaults and keeps no origins. Three parts of the command
line need them: error messages (which file holds the typo), precedence on resume (which values were given), and links
from data to module (which of two values was typed).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import yaml

from ..common.configs import find_config, read_config
from ..common.errors import UserError
from ..common.names import did_you_mean
from ..common.typed_values import Source, Typed

SUBCOMMANDS = ("fit", "validate", "test", "predict")
FLAGS = ("--help", "-h", "--version", "--print_config")  # take no value from the next word
SECTIONS = ("--model", "--data", "--trainer")  # their value may be a YAML file


def read_command_line(words: Sequence[str]) -> Typed:
    """Split the command line and its YAML files into their keys.

    Raises:
        UserError: For an unknown subcommand, and for a config file that is missing or is not YAML.
    """
    typed = Typed([word for word in words if word != "--debug"])
    options = list(_options(typed.words))
    place = next((number for number, (option, _) in enumerate(options) if not option.startswith("-")), None)
    if place is None:
        if not {"--help", "-h"}.intersection(option for option, _ in options):
            raise UserError(f"A subcommand is needed: one of {', '.join(SUBCOMMANDS)}; see vlightning --help.")
        typed.args = typed.words
        return typed
    typed.subcommand, _ = options.pop(place)
    if typed.subcommand not in SUBCOMMANDS:
        raise UserError(f"There is no subcommand {typed.subcommand!r}; {did_you_mean(typed.subcommand, SUBCOMMANDS)}")
    typed.args = [typed.subcommand]
    for number, (option, value) in enumerate(options):
        if not option.startswith("-"):
            raise UserError(f"{option!r} belongs to no option; options begin with two dashes, as in --{option}.")
        if number < place and option not in ("--config", *FLAGS):
            raise UserError(f"{option} stands before the subcommand; begin with one of {', '.join(SUBCOMMANDS)}.")
        _add(typed, option, value, early=number < place)
    return typed


def as_config(tree: dict[str, Any]) -> str:
    """Return values as a word for jsonargparse."""
    return f"--config={yaml.safe_dump(tree, default_flow_style=True, width=float('inf'))}"


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option with its value, from the same word or the next one; None without a value."""
    rest = list(words)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option.startswith("-") and option not in FLAGS and not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        yield "--config" if option == "-c" else option, value if equals else None


def _add(typed: Typed, option: str, value: str | None, early: bool) -> None:
    """Add a flag, `--config a.yaml`, `--model model.yaml` or `--key value`.

    A config before the subcommand may hold a section for each subcommand.
    """
    word = option if value is None else f"{option}={value}"
    tree: Any = None
    origin = option.removesuffix("+")
    kind: Literal["option", "file"] = "option"
    if option == "--config" or (option in SECTIONS and str(value).endswith((".yaml", ".yml"))):
        if not value:
            raise UserError("--config needs the name of a YAML file.")
        path = find_config(value)
        tree, origin, kind = read_config(path) if path else {}, str(path or value), "file"
        word = f"{option}={origin}"
        if path and option == "--config":
            typed.config_files.append(path)
        if early and any(subcommand in tree for subcommand in SUBCOMMANDS):
            tree = tree.get(str(typed.subcommand)) or {}
            word = as_config(tree)
    elif value is not None:
        try:
            tree = yaml.safe_load(value)
        except yaml.YAMLError:  # text
            tree = value
    if option != "--config":
        for part in reversed(option.removeprefix("--").removesuffix("+").split(".")):
            tree = {part: tree}
    typed.args.append(word)
    if option not in FLAGS:
        typed.sources.append(Source(origin, tree, kind))
