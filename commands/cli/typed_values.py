"""Values that the user typed, as options or in files: nested, each with its origin."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Source:
    """Values of one origin.

    Args:
        origin: A file's name, or the option as typed.
        tree: The values as nested dicts, from the subcommand's level down (`{"trainer": {"max_epochs": 3}}`).
        kind: An option of the command line, a YAML file, or the hyper-parameters of a checkpoint.
    """

    origin: str
    tree: dict[str, Any]
    kind: Literal["option", "file", "checkpoint"] = "option"

    def __post_init__(self) -> None:
        for key in ("model", "data"):  # `--model Name` is short for `--model.class_path Name`
            if isinstance(name := self.tree.get(key), str):
                self.tree[key] = {"class_path": name}
        if isinstance(name := at(self.tree, "trainer.logger"), str):
            self.tree["trainer"]["logger"] = {"class_path": name}

    def gives(self, key: str) -> bool:
        """Return whether the dotted key, or a key below it, was given here."""
        return any(True for _ in _values_at(self.tree, key.split(".")))

    @property
    def phrase(self) -> str:
        """` in x.yaml` for a file, nothing for an option."""
        return "" if self.kind == "option" else f" in {self.origin}"


@dataclass(frozen=True)
class Schedule:
    """The length of a recipe's run, as its config states it in `schedule`; a fit does not read it.

    Args:
        steps: Number of optimizer steps.
        batch: Rows of all processes in a step.
        unit: What a row is.
        epochs: Number of passes over the data.
        rows: Number of rows of the data.
        warmup_steps: Number of steps of the warm-up.
    """

    steps: int
    batch: int
    unit: Literal["images", "pairs", "captions"] = "pairs"
    epochs: float | None = None
    rows: int | None = None
    warmup_steps: int = 0


@dataclass
class Typed:
    """The parts of the command line.

    Args:
        words: The words as typed, without `--debug`.
        args: The same for jsonargparse: the subcommand first, shipped configs resolved to files.
        subcommand: `fit`, `validate`, `test` or `predict`; None for `--help`.
        sources: Origins of values, in ascending order of precedence.
        config_files: The `--config` files in order.
        derived: Those of them that change others: they have a line `needs`.
        schedule: The length of the run that the last of them states.
    """

    words: list[str]
    args: list[str] = field(default_factory=list)
    subcommand: str | None = None
    sources: list[Source] = field(default_factory=list)
    config_files: list[Path] = field(default_factory=list)
    derived: list[Path] = field(default_factory=list)
    schedule: Schedule | None = None

    def lookup(self, key: str) -> Any:
        """Return the last value given for a dotted key, or None; `init_args` may be left out of the key."""
        values = [value for source in self.sources for value in _values_at(source.tree, key.split("."))]
        return values[-1] if values else None

    def is_given(self, key: str) -> bool:
        """Return whether the key, or a key below it, was given."""
        return bool(self._giving(key))

    def origin(self, key: str) -> str | None:
        """Return the last option or file, not checkpoint, that gave the key, or None."""
        return next((each.origin for each in reversed(self._giving(key)) if each.kind != "checkpoint"), None)

    def _giving(self, key: str) -> list[Source]:
        return [source for source in self.sources if source.gives(key)]


def at(values: Any, path: str) -> Any:
    """Return the value at a dotted path of nested mappings or namespaces, or None."""
    for key in path.split("."):
        values = values.get(key) if hasattr(values, "get") else None
    return values


def leaves(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return arguments by dotted name, with groups of settings opened."""
    values_by_option: dict[str, Any] = {}
    for name, value in arguments.items():
        group = isinstance(value, Mapping) and value and "class_path" not in value
        values_by_option |= leaves(value, f"{prefix}{name}.") if group else {f"{prefix}{name}": plain(value)}
    return values_by_option


def plain(value: Any) -> Any:
    """Return namespaces as dicts and tuples as lists, so that values from a checkpoint and from the parser compare."""
    value = value.as_dict() if hasattr(value, "as_dict") else value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _values_at(tree: Any, keys: list[str]) -> Iterator[Any]:
    """Yield values at a dotted key; the `init_args` level may be left out on either side."""
    if not keys:
        yield tree
    elif isinstance(tree, dict):
        if keys[0] in tree:
            yield from _values_at(tree[keys[0]], keys[1:])
        elif keys[0] == "init_args":
            yield from _values_at(tree, keys[1:])
        elif isinstance(tree.get("init_args"), dict):
            yield from _values_at(tree["init_args"], keys)
