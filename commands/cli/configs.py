"""Config files: the user's, and those shipped with the package."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ...common.names import did_you_mean
from .typed_values import Schedule, Typed

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
WHOLE = {"model", "data", "trainer", "checkpoint", "last_checkpoint", "compile"}
"""Keys of a whole configuration, as in the `config.yaml` of a run or from `--print_config`."""


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
    there = [str(path.with_name(p.name)) for p in path.parent.glob("*.y*ml")]
    what = "is a folder" if path.is_dir() else "does not exist"
    raise UserError(f"Expected a YAML file, got {name!r}, which {what}: {did_you_mean(name, [*there, *shipped])}")


def schedule_of(path: Path, stated: Any) -> Schedule:
    """Return the length of the run that a config states in `schedule`.

    Args:
        path: The config.
        stated: The value of the key.

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
    """Check the line `needs` of a config: files that must come before it.

    The config of an earlier run, or a checkpoint, contains them.

    Args:
        path: The config.
        needs: Names of the files, relative to the config's folder.
        typed: What was given before the config.

    Raises:
        UserError: If one of them was not given.
    """
    wanted = [Path(os.path.normpath(path.parent / name)) for name in ([needs] if isinstance(needs, str) else needs)]
    resumed = any(word.startswith("--ckpt_path") for word in typed.words)
    of_a_run = any(source.tree.keys() >= WHOLE for source in typed.sources if source.kind == "file")
    if not (
        resumed or of_a_run or {file.resolve() for file in wanted} <= {file.resolve() for file in typed.config_files}
    ):
        given = ", ".join(map(str, typed.config_files)) or "no other config"
        command = " ".join(f"--config {file}" for file in (*wanted, path))
        raise UserError(
            f"Expected {' and '.join(map(str, wanted))} before {path}, which is a part of its recipe, got {given}: "
            f"give {command}."
        )
