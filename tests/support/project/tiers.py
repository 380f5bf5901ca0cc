"""Selection of the tier `unit`: tests whose source starts no process or training run, and exports no program.

Loader workers are processes; calls with `num_workers=` other than 0 start them. Each export of a program runs a
compiler for seconds: tests that call `export_towers` or `write_programs` are left out; those that export a checkpoint
start more anyway.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

STARTING_MODULES = {
    "multiprocessing",
    "subprocess",
    "support.runs.command_line",
    "support.runs.distributed",
    "support.runs.fork_server",
    "support.runs.forked",
    "support.runs.killed_run",
    "support.runs.loader_workers",
    "support.runs.processes",
    "support.runs.recipes",
    "support.runs.resume",
    "support.runs.slurm_cluster",
    "support.project.wheel",
}
EXPORTING_NAMES = {"export_towers", "write_programs"}
STARTING_NAMES = {"Trainer", "trainer", "fit", "validate", "predict", "loader workers"} | EXPORTING_NAMES


def starts_something(file: Path, function: str) -> bool:
    """Return whether a test function, or what it uses of its own file, starts one of these."""
    definitions, imported = _contents(file)
    seen: set[str] = set()
    waiting = {function}
    while waiting:
        name = waiting.pop()
        if name in imported or name in STARTING_NAMES:
            return True
        seen.add(name)
        waiting |= (definitions.get(name, set()) & (definitions.keys() | imported | STARTING_NAMES)) - seen
    return False


@cache
def _contents(file: Path) -> tuple[dict[str, set[str]], set[str]]:
    """The names that each definition of a file uses, and the names that it imports from where something starts."""
    tree = ast.parse(file.read_text())
    definitions: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = set(_names(node))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    definitions[target.id] = set(_names(node.value))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in STARTING_MODULES:
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name for alias in node.names if alias.name in STARTING_MODULES}
    return definitions, imported


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.arg):  # a fixture
            yield part.arg
        elif isinstance(part, ast.keyword) and part.arg == "num_workers" and ast.unparse(part.value) != "0":
            yield "loader workers"
