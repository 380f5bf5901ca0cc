"""The command `vlightning new`."""

import keyword
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ...common.errors import UserError
from ..cli.command_parser import CommandParser

TEMPLATE = Path(__file__).resolve().parent / "template"
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    # Below src, so that a folder of the package's name, where the commands are typed, does not hide the package.
    "init.py": "src/$name/__init__.py",
    "module.py": "src/$name/module.py",
    "quickstart.yaml": "quickstart.yaml",
    "test_method.py": "tests/test_method.py",
}
"""Files of the template, which end in `.txt` there, and their paths in the new folder."""


def run_new(words: list[str]) -> str:
    """Run `vlightning new method NAME`: write a package with a method that trains at once.

    Args:
        words: The arguments after `new`.

    Returns:
        The files that were written, and the commands to go on with.

    Raises:
        UserError: If the name is not one of a Python package, or another package has it, or the folder is not empty.
    """
    typed = parser_of_new().parse_args(words)
    name: str = typed.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(
            f"Expected a name of lower-case letters, digits and underscores, such as my_method, got {name!r}."
        )
    if (installed := find_spec(name)) is not None and installed.origin is not None:
        raise UserError(f"Expected a name that no installed package has, got {name!r}, which is {installed.origin}.")
    folder = Path(typed.folder or name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"Expected a new or an empty folder, got {folder}: give another with --folder.")
    values = {"name": name, "project": name.replace("_", "-"), "cls": class_of(name)}
    lines = [f"Wrote {folder}:"]
    for source, target in FILES.items():
        path = folder / Template(target).substitute(values)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template((TEMPLATE / f"{source}.txt").read_text(encoding="utf-8")).substitute(values), "utf-8")
        lines.append(f"  {path.relative_to(folder)}")
    return "\n".join([*lines, "Go on with", *(f"  {line}" for line in _commands(folder)), ""])


def class_of(name: str) -> str:
    """Return the name of the class of a method: `MyMethodModule` for `my_method`."""
    return "".join(word.capitalize() for word in name.split("_")) + "Module"


def parser_of_new() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(
        "new",
        description="Write a Python package with a method of your own: module, config, test and page. It trains and "
        "passes its test as it is; then replace its loss and its towers.",
    )
    parser.add_argument("kind", choices=("method",), help="what to write")
    parser.add_argument("name", help="name of the package, such as my_method")
    parser.add_argument("--folder", help="where to write it; by default a folder of that name")
    return parser


def _commands(folder: Path) -> list[str]:
    quoted = shlex.quote(str(folder))
    return [
        f"pip install -e {quoted}",
        f"vlightning fit --config {quoted}/quickstart.yaml",
        f"pytest {quoted}",
    ]
