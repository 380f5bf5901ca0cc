"""Run folders of SLURM jobs: a requeued job finds the folder of each of its commands again."""

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.environments import SLURMEnvironment

from .command_line import Typed

# File in the folder of a SLURM job that names the command of the job to which the folder belongs.
NOTE = ".slurm.json"


def is_requeued(typed: Typed) -> bool:
    """Whether this is a `fit` in a job that SLURM has started before."""
    again = SLURMEnvironment.detect() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    return again and typed.subcommand == "fit"


def requeued_folder(parent: Path, typed: Typed) -> Path | None:
    """Return the folder in `parent` that this command claimed when its job was started before; None if it has none.

    A job may run several commands, also of one config at a time. Each notes its words in its folder; commands with
    the same words differ in the job's step.
    """
    if not is_requeued(typed):
        return None
    stem = f"slurm_{SLURMEnvironment.job_id()}"
    folders = sorted(parent.glob(f"{stem}_*"), key=lambda path: (len(path.name), path.name))
    folders = [parent / stem, *(path for path in folders if path.name.removeprefix(f"{stem}_").isdigit())]
    folders = [path for path in folders if path.is_dir()]
    mine, notes = _note(typed), [_read_note(folder) for folder in folders]
    for names in (("words", "step"), ("words",)):
        for folder, note in zip(folders, notes, strict=True):
            if all(note.get(name) == mine[name] for name in names):
                return folder
    # The only command of the job, with other words than before.
    return folders[0] if len(folders) == 1 and notes[0].get("restart") != mine["restart"] else None


def next_free(parent: Path, typed: Typed) -> tuple[Path, bool]:
    """Create a new folder in `parent`, or return that of this command in a requeued job; and whether it is new."""
    if not SLURMEnvironment.detect():
        return numbered(parent, "version"), True
    stem = f"slurm_{SLURMEnvironment.job_id()}"
    if typed.subcommand != "fit":
        return numbered(parent, f"{stem}_{typed.subcommand}"), True
    own = requeued_folder(parent, typed)
    folder = own or parent / stem
    parent.mkdir(parents=True, exist_ok=True)
    try:
        if own is None:
            folder.mkdir()
    except FileExistsError:
        folder = numbered(parent, stem)
    (folder / NOTE).write_text(json.dumps(_note(typed)), encoding="utf-8")
    return folder, own is None


def numbered(parent: Path, stem: str) -> Path:
    """Create `<stem>_<n>` with the next free number, so that two runs that start together get different ones."""
    parent.mkdir(parents=True, exist_ok=True)
    taken = [path.name.removeprefix(f"{stem}_") for path in parent.glob(f"{stem}_*")]
    number = max((int(n) for n in taken if n.isdigit()), default=-1) + 1
    while True:
        try:
            (parent / f"{stem}_{number}").mkdir()
            return parent / f"{stem}_{number}"
        except FileExistsError:
            number += 1


def _note(typed: Typed) -> dict[str, Any]:
    """Return the command's words, its step in the job, and how often the job was restarted."""
    of_job = {"step": os.environ.get("SLURM_STEP_ID"), "restart": os.environ.get("SLURM_RESTART_COUNT", "0")}
    return {"words": typed.args, **of_job}


def _read_note(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
