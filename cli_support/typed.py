"""What the user typed: the command line and its YAML files, key by key, each with where it came from.

jsonargparse merges everything into one namespace with the defaults and forgets who said what. Three parts of the
command line need to know: the error messages (which file holds the typo), the precedence on resume (which values were
given), and the links from data to module (which of two values was typed).
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

SUBCOMMANDS = ("fit", "validate", "test", "predict")
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
# Options that take no value in the next word.
FLAGS = ("--help", "-h", "--version", "--print_config")
PACKAGE_ROOT = Path(__file__).resolve().parent.parent


class UsageError(Exception):
    """What was typed cannot be run; the message is one sentence, the exit status 2."""


@dataclass(frozen=True)
class Source:
    """One place where values were given.

    Args:
        origin: For messages: a file's name, or the option as typed.
        tree: The values as nested dicts, from the subcommand's level down (`{"trainer": {"max_epochs": 3}}`).
        kind: An option of the command line, a YAML file, or the hyper-parameters of a checkpoint.
    """

    origin: str
    tree: dict[str, Any]
    kind: Literal["option", "file", "checkpoint"] = "option"

    @property
    def place(self) -> str:
        """` in x.yaml` for a file, nothing for the command line, where the key says enough."""
        return "" if self.kind == "option" else f" in {self.origin}"


@dataclass
class Typed:
    """The command line taken apart.

    Args:
        args: The words to hand to jsonargparse: shipped configs resolved to files, `--debug` taken out.
        subcommand: `fit`, `validate`, `test` or `predict`; None for `--help` and `--version`.
        sources: Where values came from, in the order in which they override one another.
        config_files: The `--config` files in order.
        debug: Whether `--debug` was there.
    """

    args: list[str]
    subcommand: str | None = None
    sources: list[Source] = field(default_factory=list)
    config_files: list[Path] = field(default_factory=list)
    debug: bool = False

    def lookup(self, key: str) -> Any:
        """The last value given for a dotted key, or None; `model.dim` and `model.init_args.dim` are the same key."""
        found = None
        for source in self.sources:
            for value in _values_at(source.tree, key.split(".")):
                found = value
        return found

    def is_given(self, key: str, kind: str | None = None) -> bool:
        """Whether the key, or anything below it, was given; by a source of one kind, where that is asked."""
        sources = [source for source in self.sources if kind in (None, source.kind)]
        return any(True for source in sources for _ in _values_at(source.tree, key.split(".")))

    def class_name(self, key: str) -> str | None:
        """Last component of the class named for `model` or `data`, or None."""
        path = self.class_path(key)
        return path.rsplit(".", 1)[-1] if path else None

    def class_path(self, key: str) -> str | None:
        """The class named for `model` or `data`, as it was written, or None."""
        name = None
        for source in self.sources:
            value = source.tree.get(key)
            value = value.get("class_path") if isinstance(value, dict) else value
            name = value if isinstance(value, str) else name
        return name or None

    def init_args(self, key: str) -> dict[str, str]:
        """Constructor arguments typed for `model` or `data`, each with its last origin; not those of a checkpoint."""
        given: dict[str, str] = {}
        for source in self.sources:
            value = source.tree.get(key)
            if isinstance(value, dict) and source.kind != "checkpoint":
                names = [*(value.get("init_args") or {}), *(name for name in value if name not in CLASS_KEYS)]
                given.update(dict.fromkeys(names, source.origin))
        return given


def nearest(name: str, valid: Sequence[str]) -> str | None:
    """The valid name that looks most like `name`, or None when nothing does."""
    lowered = {candidate.lower(): candidate for candidate in valid}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, valid: Sequence[str]) -> str:
    """End of a sentence: the nearest valid name, or all of them where they are few."""
    match = nearest(name, valid)
    if match is not None:
        return f"did you mean {match!r}?"
    if 0 < len(valid) <= 30:
        return f"valid are {', '.join(sorted(valid))}."
    return "see --help."


def read_command_line(args: Sequence[str]) -> Typed:
    """Take the command line and its YAML files apart.

    Args:
        args: The words after the program's name.

    Returns:
        What was typed.

    Raises:
        UsageError: For an unknown subcommand, and for a config file that is missing or is not YAML.
    """
    typed = Typed(args=[])
    before_subcommand: list[tuple[str, dict[str, Any]]] = []  # with a section for each subcommand
    of_subcommand: list[tuple[str, dict[str, Any]]] = []  # as if it stood behind the subcommand
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--debug":
            typed.debug = True
            continue
        if not word.startswith("-"):
            if typed.subcommand is not None:
                raise UsageError(f"{word!r} belongs to no option; options begin with two dashes, as in --{word}.")
            if word not in SUBCOMMANDS:
                raise UsageError(f"There is no subcommand {word!r}; {did_you_mean(word, SUBCOMMANDS)}")
            typed.subcommand = word
            typed.args += [word, *(f"--config={name}" for name, _ in of_subcommand)]
            typed.sources += [Source(name, tree, "file") for name, tree in of_subcommand]
            continue
        option, equals, value = word.partition("=")
        if not equals and option not in FLAGS and words and not words[0].startswith("--"):
            value, equals = words.pop(0), "="
        if typed.subcommand is None and option not in (*FLAGS, "--config", "-c", "--print_shtab"):
            raise UsageError(f"{option} stands before the subcommand; begin with one of {', '.join(SUBCOMMANDS)}.")
        if option in ("--config", "-c"):
            if not value:
                raise UsageError("--config needs the name of a YAML file.")
            path, tree = find_config(value), {}
            if path is not None:
                typed.config_files.append(path)
                tree, value = read_yaml(path), str(path)
            if typed.subcommand is None and path is not None and not any(name in tree for name in SUBCOMMANDS):
                of_subcommand.append((value, tree))
                continue
            if typed.subcommand is None:
                before_subcommand.append((value, tree))
            else:
                typed.sources.append(Source(value, tree, "file"))
            typed.args.append(f"--config={value}")
            continue
        typed.args.append(f"{option}={value}" if equals else option)
        if option not in FLAGS and option.startswith("--"):
            typed.sources.append(_option_source(option[2:].rstrip("+"), value if equals else None))
    if typed.subcommand is None and not any(word.startswith(("-h", "--help", "--print")) for word in typed.args):
        raise UsageError(f"A subcommand is needed: one of {', '.join(SUBCOMMANDS)}; see vlightning --help.")
    if typed.subcommand is not None:
        first = [Source(name, tree.get(typed.subcommand) or {}, "file") for name, tree in before_subcommand]
        typed.sources[:0] = first
    return typed


def find_config(name: str) -> Path | None:
    """Where a config file is: as named, or among those shipped with the package.

    Args:
        name: What stood after `--config`; `configs/albef/quickstart.yaml` works from any folder.

    Returns:
        The file; None if `name` is YAML text rather than a file name, or a URL.

    Raises:
        UsageError: If there is no such file; names the nearest one.
    """
    if "://" in name or "\n" in name or name.lstrip().startswith("{"):
        return None
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if not path.is_absolute():
        for root in (PACKAGE_ROOT, PACKAGE_ROOT / "configs"):
            if (root / path).is_file():
                return root / path
    shipped = sorted(str(p.relative_to(PACKAGE_ROOT)) for p in (PACKAGE_ROOT / "configs").rglob("*.yaml"))
    there = [str(path.with_name(p.name)) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    what = "is a folder, not a YAML file" if path.is_dir() else "does not exist"
    raise UsageError(f"The config file {name!r} {what}; {did_you_mean(name, [*there, *shipped])}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Args:
        path: The file.

    Returns:
        Its content; empty for an empty file.

    Raises:
        UsageError: If it is not YAML, or not a mapping.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not valid YAML: {error.problem or error.context}.") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(f"{path} holds a {type(tree).__name__} where `key: value` lines are expected.")
    return {str(key): value for key, value in tree.items()}


def _option_source(key: str, text: str | None) -> Source:
    """One `--key value` of the command line as a source; `--model model.yaml` reads that file."""
    value: Any = None
    if text is not None:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
    origin = f"--{key}"
    kind: Literal["option", "file"] = "option"
    if isinstance(value, str) and value.endswith((".yaml", ".yml")) and key in ("model", "data", "trainer"):
        if not Path(value).is_file():
            there = [str(Path(value).with_name(p.name)) for p in Path(value).parent.glob("*.y*ml")]
            raise UsageError(f"The config file {value!r} of {origin} does not exist; {did_you_mean(value, there)}")
        origin, kind, value = value, "file", read_yaml(Path(value))
    tree = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return Source(origin, tree, kind)


def _values_at(tree: Any, parts: list[str]) -> Iterator[Any]:
    """Values at a dotted key; the `init_args` level may be left out on either side."""
    if not parts:
        yield tree
    elif isinstance(tree, dict):
        if parts[0] in tree:
            yield from _values_at(tree[parts[0]], parts[1:])
        elif parts[0] == "init_args":
            yield from _values_at(tree, parts[1:])
        elif isinstance(tree.get("init_args"), dict):
            yield from _values_at(tree["init_args"], parts)
