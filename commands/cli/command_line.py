"""Reading of the command line and its YAML files: each given value with its origin.

jsonargparse merges all values and defaults into one namespace without origins. Three parts of the command line need the
origins: error messages (which file has the typing error), precedence on resume (which values were given), and links
from the data to the module (which of two values was given).
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from ...common.errors import UserError
from ...common.files import read_yaml
from ...common.names import did_you_mean
from .listing import COMMANDS, PACKAGE_ROOT
from .typed_values import Schedule, Source, Typed

SUBCOMMANDS = ("fit", "validate", "test", "predict")
FLAGS = ("--help", "-h", "--version", "--print_config")  # options without a value
SECTIONS = ("--model", "--data", "--trainer")  # options whose value may be a YAML file
# Keys of a whole configuration, as in the `config.yaml` of a run or from `--print_config`.
WHOLE = {"model", "data", "trainer", "checkpoint", "last_checkpoint", "compile"}


def read_command_line(words: Sequence[str]) -> Typed:
    """Split the command line and its YAML files into keys with values.

    Options override files wherever they stand. jsonargparse applies both in the order of the words, so that
    `--ckpt_path last --config config.yaml` would take the file's `ckpt_path: null`.

    Raises:
        UserError: If the subcommand is missing or unknown, an option has another form, or a config file does not exist
            or is not YAML.
    """
    typed = Typed([word for word in words if word != "--debug"])
    options = list(_options(typed.words))
    position = next((number for number, (option, _) in enumerate(options) if not option.startswith("-")), None)
    if position is None:
        if not {"--help", "-h"}.intersection(option for option, _ in options):
            raise UserError(
                f"Expected a subcommand, got none: use one of {', '.join(SUBCOMMANDS)}, or see vlightning --help."
            )
        typed.args = typed.words
        return typed
    typed.subcommand, _ = options.pop(position)
    if typed.subcommand not in SUBCOMMANDS:
        raise UserError(f"Expected a subcommand, got {typed.subcommand!r}: {did_you_mean(typed.subcommand, COMMANDS)}")
    typed.args = [typed.subcommand]
    placed_options: list[tuple[str, str | None, bool]] = []
    for number, (option, value) in enumerate(options):
        if not option.startswith("-"):
            raise UserError(f"Expected an option, got {option!r}: begin it with two dashes, as in --{option}.")
        if number < position and option not in ("--config", *FLAGS):
            raise UserError(
                f"Expected a subcommand, got {option} before it: begin with one of {', '.join(SUBCOMMANDS)}."
            )
        placed_options.append((option, value, number < position))
    ordered = sorted(placed_options, key=lambda each: _precedence(*each[:2]))
    if ordered and _precedence(*ordered[0][:2]) < 2:
        # A file may give arguments of a class that only an option names: the class is known before the files are read.
        named = [each for each in ordered if each[0] in ("--model", "--data") and not _is_section_file(*each[:2])]
        ordered = named + ordered
    for option, value, before_subcommand in ordered:
        _add(typed, option, value, before_subcommand)
    return typed


def as_config(tree: dict[str, Any]) -> str:
    """Return values as an option `--config=<YAML text>` for jsonargparse."""
    return f"--config={yaml.safe_dump(tree, default_flow_style=True, width=float('inf'))}"


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option with its value, which is in the same word or in the next one; None without a value."""
    rest = list(words)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option.startswith("-") and option not in FLAGS and not equals and rest and not rest[0].startswith("--"):
            equals = "="
            value = rest.pop(0)
        yield "--config" if option == "-c" else option, value if equals else None


def _is_section_file(option: str, value: str | None) -> bool:
    return option in SECTIONS and str(value).endswith((".yaml", ".yml"))


def _precedence(option: str, value: str | None) -> int:
    """Return the rank of an option: those of higher rank override `--config` (0) and `--data x.yaml` (1)."""
    if option == "--config":
        return 0
    return 1 if _is_section_file(option, value) else 2


def _add(typed: Typed, option: str, value: str | None, before_subcommand: bool) -> None:
    """Add an option with its value, None for a flag, to the parts of the command line, which are changed in place.

    A config before the subcommand may have a section for each subcommand.

    Raises:
        UserError: If a config file is not named, does not exist, or is not YAML.
    """
    word = option if value is None else f"{option}={value}"
    tree: Any = None
    origin = option.removesuffix("+")
    kind: Literal["option", "file"] = "option"
    if option == "--config" or _is_section_file(option, value):
        if not value:
            raise UserError("Expected the name of a YAML file after --config, got none: add it.")
        path = find_config(value)
        tree = read_yaml(path) if path else {}
        origin = str(path or value)
        kind = "file"
        word = f"{option}={origin}"
        if path and option == "--config":
            if "schedule" in tree:
                typed.schedule = schedule_of(path, tree.pop("schedule"))
                word = as_config(tree)
            if "needs" in tree:
                check_needed(path, tree.pop("needs"), typed)
                word = as_config(tree)
                typed.derived.append(path)
            typed.config_files.append(path)
        if before_subcommand and any(subcommand in tree for subcommand in SUBCOMMANDS):
            tree = tree.get(str(typed.subcommand)) or {}
            word = as_config(tree)
    elif value is not None:
        try:
            tree = yaml.safe_load(value)
        except yaml.YAMLError:  # a text that is not YAML
            tree = value
    if option != "--config":
        for key in reversed(option.removeprefix("--").removesuffix("+").split(".")):
            tree = {key: tree}
    typed.args.append(word)
    if option not in FLAGS:
        typed.sources.append(Source(origin, tree, kind))


def find_config(name: str) -> Path | None:
    """Find a config file, as named or among those shipped with the package; None for YAML text and for a URL.

    Raises:
        UserError: If there is no such file; names the nearest one.
    """
    if "://" in name or "\n" in name or name.lstrip().startswith("{"):
        return None
    path = Path(name).expanduser()
    for candidate in (path, PACKAGE_ROOT / path, PACKAGE_ROOT / "configs" / path):
        if candidate.is_file():
            return candidate
    shipped = [str(p.relative_to(PACKAGE_ROOT)) for p in (PACKAGE_ROOT / "configs").rglob("*.yaml")]
    beside = [str(path.with_name(p.name)) for p in path.parent.glob("*.y*ml")]
    mistake = "is a folder" if path.is_dir() else "does not exist"
    raise UserError(f"Expected a YAML file, got {name!r}, which {mistake}: {did_you_mean(name, [*beside, *shipped])}")


def schedule_of(path: Path, stated: Any) -> Schedule:
    """Return the length of the run that a config states as the value of its key `schedule`.

    Raises:
        UserError: If it does not give steps and batch as positive whole numbers, or has another key.
    """
    names = [field.name for field in dataclasses.fields(Schedule)]
    numbers = [stated.get(name) for name in ("steps", "batch")] if isinstance(stated, dict) else [None]
    if not (all(type(number) is int and number > 0 for number in numbers) and set(stated) <= set(names)):
        raise UserError(
            f"Expected a schedule with positive whole numbers of steps and batch in {path}, and no other keys than "
            f"{', '.join(names)}, got {stated}: correct it."
        )
    return Schedule(**stated)


def check_needed(path: Path, needs: str | list[str], typed: Typed) -> None:
    """Check the line `needs` of a config: files, relative to the config's folder, that must come before it.

    The config of an earlier run, or a checkpoint, contains them.

    Raises:
        UserError: If one of them was not given.
    """
    needed = [Path(os.path.normpath(path.parent / name)) for name in ([needs] if isinstance(needs, str) else needs)]
    is_resumed = any(word.startswith("--ckpt_path") for word in typed.words)
    has_config_of_run = any(source.tree.keys() >= WHOLE for source in typed.sources if source.kind == "file")
    if not (
        is_resumed
        or has_config_of_run
        or {file.resolve() for file in needed} <= {file.resolve() for file in typed.config_files}
    ):
        configs = ", ".join(map(str, typed.config_files)) or "no other config"
        command = " ".join(f"--config {file}" for file in (*needed, path))
        raise UserError(
            f"Expected {' and '.join(map(str, needed))} before {path}, which is a part of its recipe, got {configs}: "
            f"give {command}."
        )
