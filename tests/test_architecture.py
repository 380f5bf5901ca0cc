"""Imports between folders of the package, and uses of private names of other packages."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "vlightning"
METHODS = {"albef", "clip", "cocord", "mmlg", "mobileclip", "shre"}
COMMAND_LINE = {"cli.py", "cli_support", "data_report", "demo", "evaluate", "hub", "planning", "terminal"}
ROOMS = {"lightning_modules", "datamodules", "callbacks", "metrics", "common", *COMMAND_LINE}
FOREIGN = ("lightning", "torch", "torchmetrics", "jsonargparse", "timm", "open_clip", "transformers", "torchvision")

# Folders that each folder may import beside itself. `shared` is lightning_modules/ without the methods.
ALLOWED = {
    "method": {"shared", "callbacks", "metrics", "common"},
    "shared": {"callbacks", "metrics", "common"},
    "callbacks": {"metrics", "common"},
    "datamodules": {"common"},
    "metrics": set(),
    "common": set(),
}

DOCUMENTED = {"_replace", "_asdict", "_make", "_exit"}  # of named tuples and of `os`: public despite their names


def files():
    """Every Python file of the package, without tests and benchmarks."""
    found = [path for room in ROOMS if not room.endswith(".py") for path in (ROOT / room).rglob("*.py")]
    return sorted(found + [ROOT / room for room in ROOMS if room.endswith(".py")])


TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files() if path.is_file()}


def room_of(parts):
    """Return the folder of a module, such as `lightning_modules/albef` for a method."""
    if parts[0] in COMMAND_LINE or f"{parts[0]}.py" in COMMAND_LINE:
        return "command line"
    if parts[0] == "lightning_modules":
        inner = parts[1].removesuffix(".py") if len(parts) > 1 else "__init__"
        return (
            f"lightning_modules/{inner}"
            if inner in METHODS
            else "root"
            if inner in ("__init__", "exports")
            else "shared"
        )
    return parts[0]


def imports(file, tree):
    """Parts of the modules of this package that a file imports."""
    here = [*Path(file).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                target = here[: len(here) - node.level + 1] + module
                # `from . import name`: the name may be a module.
                yield from ([*target, alias.name] if not module else target for alias in node.names)
            elif module[:1] == [PACKAGE]:
                yield module[1:] or [node.names[0].name]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE and "." in alias.name:
                    yield alias.name.split(".")[1:]


def violations():
    found = set()
    for file, tree in TREES.items():
        room = room_of(Path(file).parts)
        if room in ("command line", "root"):
            continue
        allowed = ALLOWED["method" if room.startswith("lightning_modules/") else room] | {room}
        for target in imports(file, tree):
            if target and room_of(target) not in allowed:
                found.add(f"{file} imports {'.'.join(target)}")
    return found


def own_names():
    """Private names that this package defines or sets itself."""
    names = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def private_names():
    """Private names of other packages, by file."""
    own, found = own_names(), defaultdict(set)
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            names = set()
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in FOREIGN:
                names = {*node.module.split("."), *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Attribute):
                names = {node.attr} - own
            found[file] |= {name for name in names if name.startswith("_") and not name.startswith("__")} - DOCUMENTED
    return {file: names for file, names in found.items() if names}


def test_folders_import_only_allowed_folders():
    assert violations() == set()


def test_private_names_of_other_packages_are_used_in_listed_files_only():
    found = private_names()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*?) \|", (ROOT / "docs/architecture.md").read_text(), re.M)
    for file, listed in rows:
        if not listed.startswith("the names in that file"):  # which gives the reasons itself
            assert {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", listed)} == found[file], file
    assert {file for file, _ in rows} == set(found)
    used = [name for names in found.values() for name in names]
    assert {name for name in used if used.count(name) > 1} == set()


def test_the_import_of_a_sibling_is_found():
    tree = ast.parse("from ..networks.clip.models import build_model\nfrom ...cli_support import report")
    found = [".".join(target) for target in imports("lightning_modules/albef/module.py", tree)]
    assert found == ["lightning_modules.networks.clip.models", "cli_support"]
