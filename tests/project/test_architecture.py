"""Imports between folders and files of the package, and uses of private names of other packages."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from support.project.sources import ROOT, TREES

PACKAGE = "vlightning"
FOREIGN = ("lightning", "torch", "torchmetrics", "jsonargparse", "timm", "open_clip", "transformers", "torchvision")

FLOORS = {
    # the root
    "metrics": 0,
    "common": 0,
    "callbacks": 1,
    "datamodules": 1,
    "lightning_modules": 2,
    "commands": 3,
    "cli.py": 4,
    "api.py": 4,
    "__init__.py": 5,
    # lightning_modules/; `__init__.py` is above all
    "lightning_modules/core": 0,
    "lightning_modules/networks": 1,
    "lightning_modules/losses": 1,
    "lightning_modules/optim": 1,
    "lightning_modules/evaluation": 1,
    "lightning_modules/base": 2,
    "lightning_modules/albef": 3,
    "lightning_modules/clip": 3,
    "lightning_modules/cocord": 3,
    "lightning_modules/mmlg": 3,
    "lightning_modules/mobileclip": 3,
    "lightning_modules/shre": 3,
    "lightning_modules/__init__.py": 4,
    # datamodules/
    "datamodules/text": 0,
    "datamodules/transforms": 0,
    "datamodules/base": 1,
    "datamodules/reading": 2,
    "datamodules/stores": 2,
    "datamodules/streams": 3,
    "datamodules/pairs": 4,
    "datamodules/labels": 4,
    "datamodules/questions": 5,
    "datamodules/grounding": 5,
    "datamodules/tasks": 5,
    "datamodules/reinforced": 5,
    "datamodules/drawn": 6,
    "datamodules/__init__.py": 7,
}
"""The floor of each folder among the folders beside it. A folder imports itself and folders on lower floors."""

ARROWS = {
    "callbacks": {"metrics", "common"},
    "datamodules": {"common"},
    "lightning_modules": {"callbacks", "metrics", "common"},
    "commands": {"callbacks", "metrics", "common", "datamodules", "lightning_modules"},
    "cli.py": {"commands"},
    "api.py": {"commands", "lightning_modules", "callbacks", "datamodules", "common"},
    "__init__.py": {"api.py", "common"},
}
"""The folders that each folder of the root imports."""

DOCUMENTED = {
    "_replace",
    "_asdict",
    "_fields",
    "_make",
    "_exit",
}  # of named tuples and of `os`: public despite their names


def module_name(file):
    """Return the name of a file's module inside the package, such as `callbacks.ema`."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


FILES = {module_name(file): file for file in TREES}


def imported_modules(file, tree):
    """Iterate over the names of the modules of this package that a file imports, at its head or inside functions."""
    folder = [*Path(file).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            elif node.module and node.module.split(".")[0] == PACKAGE:
                base = node.module.split(".")[1:]
            else:
                continue
            module = ".".join(part for part in base if part)
            for alias in node.names:
                # `from . import name`: the name may be a module.
                inner = f"{module}.{alias.name}" if module else alias.name
                yield inner if inner in FILES else module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{PACKAGE}."):
                    yield alias.name.removeprefix(f"{PACKAGE}.")


def imports_between_files():
    """Return the files that each file imports."""
    return {
        file: {FILES[module] for module in imported_modules(file, tree) if module in FILES} - {file}
        for file, tree in TREES.items()
    }


def folders_beside_each_other(file, target):
    """Return the folders, or files, of two files below the folder that both are in, at most two folders deep."""
    parts, target_parts = Path(file).parts, Path(target).parts
    if parts[0] != target_parts[0]:
        return parts[0], target_parts[0]
    return "/".join(parts[:2]), "/".join(target_parts[:2])


def may_import(file, target):
    folder, target_folder = folders_beside_each_other(file, target)
    if folder == target_folder or (folder.split("/")[0] == "commands" and "/" in folder):
        return True
    if "/" not in folder:
        return target_folder in ARROWS.get(folder, set())
    if folder not in FLOORS or target_folder not in FLOORS:  # subfolders of callbacks/ have no floors
        return folder.split("/")[0] in ("callbacks", "common", "metrics")
    return FLOORS[target_folder] < FLOORS[folder]


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


def test_every_folder_has_a_floor():
    folders = {"/".join(Path(file).parts[:2]) for file in TREES if len(Path(file).parts) > 1}
    with_floors = {folder for folder in folders if folder.split("/")[0] in ("lightning_modules", "datamodules")}
    assert with_floors == {folder for folder in FLOORS if "/" in folder}


def test_folders_import_lower_floors_only():
    edges = imports_between_files().items()
    assert [
        f"{file} imports {target}" for file, targets in edges for target in targets if not may_import(file, target)
    ] == []


def test_every_arrow_is_used_and_goes_down():
    edges = {
        folders_beside_each_other(file, target)
        for file, targets in imports_between_files().items()
        for target in targets
    }
    between_rooms = {(folder, target) for folder, target in edges if "/" not in folder and folder != target}
    assert between_rooms == {(folder, target) for folder, targets in ARROWS.items() for target in targets}
    assert all(FLOORS[target] < FLOORS[folder] for folder, target in between_rooms)


def test_no_file_imports_itself_through_others():
    edges = imports_between_files()
    # A package's `__init__.py` names what is below it: it is no step of a circle.
    imports_of = {file: {t for t in targets if not t.endswith("__init__.py")} for file, targets in edges.items()}
    finished, circles = set(), []

    def visit(file, path):
        if file in path:
            circles.append(" -> ".join([*path[path.index(file) :], file]))
        elif file not in finished:
            for target in sorted(imports_of[file]):
                visit(target, [*path, file])
            finished.add(file)

    for file in sorted(imports_of):
        visit(file, [])
    assert circles == []


def test_private_names_of_other_packages_are_used_in_listed_files_only():
    found = private_names()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*?) \|", (ROOT / "docs/architecture.md").read_text(), re.M)
    for file, listed in rows:
        if not listed.startswith("the names in that file"):  # which gives the reasons itself
            assert {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", listed)} == found[file], file
    assert {file for file, _ in rows} == set(found)
    used = [name for names in found.values() for name in names]
    assert {name for name in used if used.count(name) > 1} == set()


def test_imports_are_read_in_each_form():
    tree = ast.parse("from ..networks.clip.models import build_model\nfrom ...commands import cli\nfrom . import itc")
    modules = set(imported_modules("lightning_modules/albef/module.py", tree))
    assert modules == {"lightning_modules.networks.clip.models", "commands.cli", "lightning_modules.albef.itc"}
    assert not may_import("lightning_modules/albef/module.py", "lightning_modules/clip/module.py")
    assert not may_import("lightning_modules/networks/bert.py", "lightning_modules/base/method.py")
