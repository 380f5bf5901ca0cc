"""What the user typed: the command line and its YAML files, key by key, each value with its origin.

jsonargparse merges everything into one namespace with the defaults and keeps no origins. Three parts of the command
line need them: error messages (which file holds the typo), precedence on resume (which values were given), and links
from data to module (which of two values was typed).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ..common.errors import UserError
from ..common.names import did_you_mean

SUBCOMMANDS = ("fit", "validate", "test", "predict")
# Options that take no value in the next word.
FLAGS = ("--help", "-h", "--version", "--print_config")
PACKAGE_ROOT = Path(__file__).resolve().parent.parent


class UsageError(UserError):
    """The command line cannot be run as typed; the exit status is 2."""


@dataclass(frozen=True)
class Source:
    """One place where values were given.

    Args:
        origin: A file's name, or the option as typed.
        tree: The values as nested dicts, from the subcommand's level down (`{"trainer": {"max_epochs": 3}}`).
        kind: An option of the command line, a YAML file, or the hyper-parameters of a checkpoint.
    """

    origin: str
    tree: dict[str, Any]
    kind: Literal["option", "file", "checkpoint"] = "option"

    @property
    def place(self) -> str:
        """` in x.yaml` for a file, nothing for an option."""
        return "" if self.kind == "option" else f" in {self.origin}"


@dataclass
class Typed:
    """The parts of the command line.

    Args:
        args: The words for jsonargparse: shipped configs resolved to files, `--debug` removed.
        subcommand: `fit`, `validate`, `test` or `predict`; None for `--help` and `--version`.
        sources: Origins of values, in ascending order of precedence.
        config_files: The `--config` files in order.
    """

    args: list[str] = field(default_factory=list)
    subcommand: str | None = None
    sources: list[Source] = field(default_factory=list)
    config_files: list[Path] = field(default_factory=list)

    def lookup(self, key: str) -> Any:
        """Return the last value given for a dotted key, or None; `init_args` may be left out of the key."""
        values = [value for source in self.sources for value in _values_at(source.tree, key.split("."))]
        return values[-1] if values else None

    def is_given(self, key: str, kind: str | None = None) -> bool:
        """Whether the key, or a key below it, was given, by a source of one kind or of any."""
        return any(source.kind == (kind or source.kind) for source in self._giving(key))

    def origin(self, key: str) -> str | None:
        """Return the last option or file, not checkpoint, that gave the key, or None."""
        return next((each.origin for each in reversed(self._giving(key)) if each.kind != "checkpoint"), None)

    def class_path(self, key: str) -> str | None:
        """Return the class named for `model` or `data`, as it was written, or None."""
        values = [source.tree[key] for source in self.sources if key in source.tree]
        names = [value.get("class_path") if isinstance(value, dict) else value for value in values]
        return next((name for name in reversed(names) if name and isinstance(name, str)), None)

    def _giving(self, key: str) -> list[Source]:
        return [source for source in self.sources if any(True for _ in _values_at(source.tree, key.split(".")))]


def read_command_line(args: Sequence[str]) -> Typed:
    """Split the command line and its YAML files into their keys.

    Raises:
        UsageError: For an unknown subcommand, and for a config file that is missing or is not YAML.
    """
    typed = Typed()
    before: list[tuple[str, dict[str, Any]]] = []  # files before the subcommand, which have a section for each
    words = [word for word in args if word != "--debug"]
    # A plain file before the subcommand is read as if it stood after it.
    moved: list[tuple[str, dict[str, Any]]] = []
    while words:
        option, equals, value = words.pop(0).partition("=")
        if not option.startswith("-"):
            if typed.subcommand is not None:
                raise UsageError(f"{option!r} belongs to no option; options begin with two dashes, as in --{option}.")
            if option not in SUBCOMMANDS:
                raise UsageError(f"There is no subcommand {option!r}; {did_you_mean(option, SUBCOMMANDS)}")
            typed.subcommand = option
            typed.args += [option, *(f"--config={name}" for name, _ in moved)]
            typed.sources += [Source(name, tree, "file") for name, tree in moved]
            continue
        if not equals and option not in FLAGS and words and not words[0].startswith("--"):
            value, equals = words.pop(0), "="
        if typed.subcommand is None and option not in (*FLAGS, "--config", "-c", "--print_shtab"):
            raise UsageError(f"{option} stands before the subcommand; begin with one of {', '.join(SUBCOMMANDS)}.")
        if option not in ("--config", "-c"):
            typed.args.append(f"{option}={value}" if equals else option)
            if option not in FLAGS and option.startswith("--"):
                typed.sources.append(_option_source(option[2:].rstrip("+"), value if equals else None))
            continue
        if not value:
            raise UsageError("--config needs the name of a YAML file.")
        path, tree = find_config(value), {}
        if path is not None:
            typed.config_files.append(path)
            tree, value = read_yaml(path), str(path)
        if typed.subcommand is None and path is not None and not any(name in tree for name in SUBCOMMANDS):
            moved.append((value, tree))
            continue
        typed.args.append(f"--config={value}")
        if typed.subcommand is None:
            before.append((value, tree))
        else:
            typed.sources.append(Source(value, tree, "file"))
    if typed.subcommand is not None:
        typed.sources[:0] = [Source(name, tree.get(typed.subcommand) or {}, "file") for name, tree in before]
    elif not any(word.startswith(("-h", "--help", "--print")) for word in typed.args):
        raise UsageError(f"A subcommand is needed: one of {', '.join(SUBCOMMANDS)}; see vlightning --help.")
    return typed


def find_config(name: str) -> Path | None:
    """Find a config file, as named or among those shipped with the package; None for YAML text and for a URL.

    Raises:
        UsageError: If there is no such file; names the nearest one.
    """
    if "://" in name or "\n" in name or name.lstrip().startswith("{"):
        return None
    path = Path(name).expanduser()
    for candidate in (path, PACKAGE_ROOT / path, PACKAGE_ROOT / "configs" / path):
        if candidate.is_file():
            return candidate
    shipped = [str(p.relative_to(PACKAGE_ROOT)) for p in (PACKAGE_ROOT / "configs").rglob("*.yaml")]
    there = [str(path.with_name(p.name)) for p in path.parent.glob("*.y*ml")]
    what = "is a folder, not a YAML file" if path.is_dir() else "does not exist"
    raise UsageError(f"The config file {name!r} {what}; {did_you_mean(name, [*there, *shipped])}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; an empty file gives an empty one. Anything else is a UsageError."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"{path}{where} is not valid YAML: {problem}.") from error
    if not isinstance(tree, dict | None):
        raise UsageError(f"{path} holds a {type(tree).__name__} where `key: value` lines are expected.")
    return {str(key): value for key, value in (tree or {}).items()}


def _option_source(key: str, text: str | None) -> Source:
    """Read one `--key value`; `--model model.yaml` reads that file."""
    value: Any
    try:
        value = None if text is None else yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    file = key in ("model", "data", "trainer") and isinstance(value, str) and value.endswith((".yaml", ".yml"))
    if file and not Path(value).is_file():
        there = [str(Path(value).with_name(p.name)) for p in Path(value).parent.glob("*.y*ml")]
        raise UsageError(f"The config file {value!r} of --{key} does not exist; {did_you_mean(value, there)}")
    tree = read_yaml(Path(value)) if file else value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return Source(value, tree, "file") if file else Source(f"--{key}", tree)


def _values_at(tree: Any, parts: list[str]) -> Iterator[Any]:
    """Yield values at a dotted key; the `init_args` level may be left out on either side."""
    if not parts:
        yield tree
    elif isinstance(tree, dict):
        if parts[0] in tree:
            yield from _values_at(tree[parts[0]], parts[1:])
        elif parts[0] == "init_args":
            yield from _values_at(tree, parts[1:])
        elif isinstance(tree.get("init_args"), dict):
            yield from _values_at(tree["init_args"], parts)
