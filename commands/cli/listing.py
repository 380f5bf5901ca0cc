"""Lists of the methods and of the shipped configs, from the docstrings of the methods and the configs' first lines.

The files are read and not imported, which would import torch.
"""

import ast
import re
import textwrap
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

from ...common.errors import UserError
from ...common.names import did_you_mean
from ...lightning_modules import installed

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "fit": "train, with validation",
    "validate": "evaluate a checkpoint on the validation split",
    "test": "evaluate a checkpoint on the test split",
    "predict": "write predictions or embeddings",
    "embed": "store features of images and texts, for trainings with locked towers and for search",
    "search": "search texts or images in a folder of images, or in such a store",
    "evaluate": "evaluate a checkpoint, an export or a published model on published sets or own images",
    "demo": "open a local page that searches a folder of images",
    "export": "write the model of a checkpoint for use in other code",
    "push": "publish an export on the Hugging Face hub",
    "convert": "convert a sharded checkpoint to one file, or back",
    "plan": "compute memory, traffic, largest batch and hours of a recipe before a run",
    "data": "count and draw what is in a data set before a run",
    "compare": "train configs over seeds, and compare what they reach",
    "new": "write the files of a method of one's own",
    "methods": "list the methods",
    "configs": "list the configs, of all methods or of one",
    "completion": "print a script that completes commands and configs in bash and zsh",
}

_WIDTH = 100


@dataclass(frozen=True)
class Listed:
    """A method.

    Args:
        name: name of its folder.
        module: name of its class.
        source: title and reference, the first line of its module's docstring.
        summary: what its class does, the first line of the class's docstring.
    """

    name: str
    module: str
    source: str
    summary: str


@dataclass(frozen=True)
class Config:
    """A shipped config or script: its path under the root of the package, first sentence and commands of its head."""

    path: str
    summary: str
    commands: list[str]


def methods() -> list[Listed]:
    """List the methods: the folders with a `module.py`, and the methods of other installed packages."""
    listed = []
    for file in sorted((PACKAGE_ROOT / "lightning_modules").glob("*/module.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        (module,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
        listed.append(Listed(file.parent.name, module.name, _first_line(tree), _first_line(module)))
    return [*listed, *(_installed_method(entry) for entry in installed())]


def _installed_method(entry: EntryPoint) -> Listed:
    """Describe a method of another package by its file, which is not imported; without a file, by its name."""
    package, *names = entry.module.split(".")
    spec = find_spec(package)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [Path(spec.origin)] if spec is not None and spec.origin and not names else []
    files += [folder.joinpath(*names).with_suffix(".py") for folder in folders if names]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == entry.attr:
                return Listed(entry.name, entry.attr, _first_line(tree), _first_line(node))
    return Listed(entry.name, entry.attr, f"Of the package {package}.", "")


_LISTED = ("*.yaml", "*.sh", "*.py")
_COMMANDS = tuple(f"   {program} " for program in ("vlightning", "sbatch", "kubectl", "sky", "modal", "python"))
"""Beginnings of the lines of a command, in the comment that begins a config."""


def configs(folder: str = "") -> list[Config]:
    """List the configs under a folder of `configs/`, by path."""
    return _under(folder, "*.yaml")


def _under(folder: str, *patterns: str) -> list[Config]:
    paths = [path for pattern in patterns for path in (PACKAGE_ROOT / "configs" / folder).rglob(pattern)]
    return [_config(path) for path in sorted(paths)]


def run_methods(words: list[str]) -> str:
    """Run `vlightning methods`.

    Raises:
        UserError: If there are words after `methods`.
    """
    if words and words[0] not in ("--help", "-h"):
        raise UserError(f"Expected nothing after methods, got {words[0]!r}: see vlightning configs {words[0]}.")
    lines = []
    for method in methods():
        count = len(configs(method.name))
        shipped = f", {count} configs" if count else ""
        lines += [f"{method.name} ({method.module}{shipped})", *_wrapped(method.source), *_wrapped(method.summary)]
    return "\n".join([*lines, "", "vlightning configs METHOD lists the configs of one.", ""])


def run_configs(words: list[str]) -> str:
    """Run `vlightning configs [folder]`: the configs of a method, or those of another folder, such as `slurm`.

    Raises:
        UserError: If there is no such folder, or more than one is named.
    """
    folders = sorted(path.name for path in (PACKAGE_ROOT / "configs").iterdir() if _under(path.name, *_LISTED))
    if words and words[0] in ("--help", "-h"):
        return f"usage: vlightning configs [FOLDER]\n\nFOLDER is one of {', '.join(folders)}.\n"
    if len(words) > 1:
        raise UserError(f"Expected one method after configs, got {' '.join(words)!r}: name one, or none for all.")
    others = {entry.name: entry.module.partition(".")[0] for entry in installed()}
    if words and words[0] in others and words[0] not in folders:
        return f"The configs of {words[0]} are those of the package {others[words[0]]}: give their files to --config.\n"
    if words and words[0] not in folders:
        known = [*folders, *others]
        raise UserError(f"Expected a method after configs, got {words[0]!r}: {did_you_mean(words[0], known)}")
    lines = []
    for config in _under(words[0] if words else "", *_LISTED):
        lines += [config.path, *_wrapped(config.summary), *(f"    {command}" for command in config.commands if words)]
    hint = "" if words else "\nvlightning configs METHOD shows the command of each config.\n"
    return "\n".join([*lines, hint])


def _first_line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _config(path: Path) -> Config:
    """Read the comment at the beginning of a config, or of a script after its first line; of Python, the docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
        lines = [re.sub(r"(?<=\S) +", " ", line.removeprefix(" ")) for line in docstring.splitlines()]
    else:
        head = re.match(r"(?:#!.*\n)?((?:#(?!SBATCH).*\n)*)", text)
        lines = [line.removeprefix("#") for line in (head[1] if head else "").splitlines()]
    commands = [line.strip() for line in lines if line.startswith(_COMMANDS)]
    words = []
    for line in lines:
        if line.startswith(_COMMANDS):
            break
        words.append(line.strip())
    return Config(str(path.relative_to(PACKAGE_ROOT)), _first_sentence(" ".join(words).strip()), commands)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[\w)]\.) (?=[A-Z])", text, maxsplit=1)[0].rstrip(".:")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
