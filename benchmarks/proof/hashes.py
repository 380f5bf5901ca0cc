"""What a result depends on: the resolved config, and the code of the step, its network and its data."""

import ast
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vlightning import callbacks, lightning_modules
from vlightning.commands.plan.configuration import parse_fit

ROOT = Path(__file__).resolve().parents[2]
STEP_FOLDERS = (
    "lightning_modules/losses/",
    "lightning_modules/networks/",
    "lightning_modules/optim/",
    "datamodules/drawn/",
    "datamodules/labels/",
    "datamodules/pairs/",
    "datamodules/reinforced/",
    "datamodules/text/",
    "datamodules/transforms/",
)
"""Folders whose files enter the hash where the module or the datamodule imports them, beside the method's folder."""
STEP_FILES = ("callbacks/draws.py", "callbacks/ema.py", "callbacks/queue.py")
EXPORTS = {"export.py", "programs.py", "transformers_layout.py", "dual_encoder_layout.py"}
"""Names of files that only write a trained model, and enter no hash."""
TRAINER = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
WITHOUT_EFFECT = {"num_workers", "cache_dir", "eval_batch_size", "eval_num_workers", "predict"}
"""Options of a datamodule that change no batch of a training."""


def resolved_config(words: Sequence[str]) -> dict[str, Any]:
    """Return the module, the datamodule and what of the Trainer enters a step, with all defaults.

    Args:
        words: arguments of `vlightning fit`; files that they name need not exist.
    """
    callbacks.load_all()  # so that classes are found by their short names
    lightning_modules.load_all()
    config = parse_fit(list(words)).config["fit"].as_dict()
    data = dict(config["data"])
    arguments = data.get("init_args") or {}
    data["init_args"] = {name: value for name, value in arguments.items() if name not in WITHOUT_EFFECT}
    trainer = {name: config["trainer"].get(name) for name in TRAINER}
    added = [_plain(callback) for callback in config["trainer"].get("callbacks") or []]
    resolved: dict[str, Any] = json.loads(
        json.dumps({"model": config["model"], "data": data, "trainer": trainer, "callbacks": added}, default=_plain)
    )
    return resolved


def _plain(value: Any) -> Any:
    if hasattr(value, "as_dict"):
        return value.as_dict()
    return str(value)


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the hash of a resolved config."""
    return _hash(json.dumps(config, sort_keys=True))


def step_hashes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of each file of a step: of the method, and of the networks, losses and data that it imports.

    Comments, docstrings and formatting do not enter the hash.

    Args:
        config: the resolved config, whose module and datamodule name the files.
    """
    starts = [_file_of(config[section]["class_path"]) for section in ("model", "data")]
    folders = tuple(f"{Path(start).parent}/" for start in starts if start is not None)
    files = set(STEP_FILES)
    for start in starts:
        if start is not None:
            files |= _imported(start)
    chosen = [
        file
        for file in files
        if (file.startswith((*folders, *STEP_FOLDERS)) or file in STEP_FILES) and _enters_a_step(file)
    ]
    return {file: _hash_of_file(file) for file in sorted(chosen)}


@cache
def _hash_of_file(file: str) -> str:
    return code_hash((ROOT / file).read_text(encoding="utf-8"))


def code_hash(source: str) -> str:
    """Return the hash of Python source without comments, docstrings and formatting."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [entry for entry in node.body if not _is_text(entry)] or [ast.Pass()]
    return _hash(_described(tree))


def _described(value: Any) -> str:
    """Return a text of a syntax tree that is the same in all versions of Python, unlike that of `ast.dump`.

    Fields without a value are left out: later versions have more of them.
    """
    if isinstance(value, ast.JoinedStr):
        # Python 3.12 adds an empty text at the end of some formats.
        parts = [entry for entry in value.values if not (isinstance(entry, ast.Constant) and entry.value == "")]
        return f"JoinedStr({_described(parts)})"
    if isinstance(value, ast.AST):
        fields = [(name, getattr(value, name, None)) for name in value._fields]
        inner = [f"{name}={_described(field)}" for name, field in fields if field is not None and field != []]
        return f"{type(value).__name__}({', '.join(inner)})"
    if isinstance(value, list):
        return f"[{', '.join(_described(entry) for entry in value)}]"
    return repr(value)


def changes(line: Mapping[str, Any], words: Sequence[str], accepted: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Return what has changed since a run: settings of its resolved config, and files of its step.

    Args:
        line: a line of results.
        words: the arguments that the line was measured with, as the present code reads them.
        accepted: changes that were shown to leave the numbers as they are, each with the `file` or the `setting`,
            `before`, `after`, and the reason in `why`. A setting is None where there was none.
    """
    config = resolved_config(words)
    before = flat(line["config"])
    now = flat(config)
    names = sorted(before.keys() | now.keys())
    texts = {name: f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names}
    fine = {
        f"{entry['setting']}: {entry['before']!r} -> {entry['after']!r}" for entry in accepted if "setting" in entry
    }
    changed = [texts[name] for name in names if before.get(name) != now.get(name) and texts[name] not in fine]
    hashes = step_hashes(config)
    same = {(entry["file"], entry["before"], entry["after"]) for entry in accepted if "file" in entry}
    for file in sorted(filter(_enters_a_step, line["step"].keys() | hashes.keys())):
        pair = (line["step"].get(file), hashes.get(file))
        if pair[0] != pair[1] and (file, *pair) not in same:
            changed.append(f"{file}: {pair[0]} -> {pair[1]}")
    return changed


def _enters_a_step(file: str) -> bool:
    return Path(file).name not in EXPORTS


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested settings by their dotted names."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        leaves |= flat(inner, f"{name}.{key}" if name else key)
    return leaves


def _file_of(class_path: str) -> str | None:
    """Return the file of a class of the package, relative to its root; None for a class of another package."""
    module_name, _, name = class_path.rpartition(".")
    cls = getattr(importlib.import_module(module_name), name)
    module: str = cls.__module__
    return None if not module.startswith("vlightning.") else _path_of(module.removeprefix("vlightning."))


def _path_of(module: str) -> str | None:
    """Return the file of a module of the package; None if there is none."""
    path = module.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).is_file()), None)


@cache
def _imported(start: str) -> frozenset[str]:
    """Return a file of the package and all that it imports by relative imports, directly or through others."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file in reached:
            continue
        reached.add(file)
        waiting += _direct_imports(file)
    return frozenset(reached)


def _direct_imports(file: str) -> list[str]:
    package = list(Path(file).parent.parts)
    targets = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            module = ".".join(name for name in base if name)
            for alias in node.names:
                targets += [_path_of(f"{module}.{alias.name}" if module else alias.name), _path_of(module)]
    return [target for target in targets if target is not None]
