"""Numbered folders of runs, and those of SLURM jobs: a requeued job finds the folder of each of its commands again."""

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.environments import SLURMEnvironment

from .typed_values import Typed

# File in the folder of a SLURM job that names the command of the job to which the folder belongs.
NOTE = ".slurm.json"


def is_requeued(typed: Typed) -> bool:
    """Return whether this is a `fit` in a job that SLURM has started before."""
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
    folders = [parent / stem, *(folder for _, folder in _numbered(parent, stem))]
    notes = {folder: _read_note(folder) for folder in folders if folder.is_dir()}
    note_of_command = _note(typed)
    for names in (("words", "step"), ("words",)):
        for folder, note in notes.items():
            if all(note.get(name) == note_of_command[name] for name in names):
                return folder
    unclaimed = [folder for folder, note in notes.items() if note.get("restart") != note_of_command["restart"]]
    # The job's only command may have other words than before.
    return unclaimed[0] if len(notes) == len(unclaimed) == 1 else None


def next_free(parent: Path, typed: Typed) -> tuple[Path, bool]:
    """Make a new folder in `parent`, or return that of this command in a requeued job; and whether it is new."""
    if not SLURMEnvironment.detect():
        return make_numbered(parent, "version"), True
    stem = f"slurm_{SLURMEnvironment.job_id()}"
    if typed.subcommand != "fit":
        return make_numbered(parent, f"{stem}_{typed.subcommand}"), True
    requeued = requeued_folder(parent, typed)
    folder = requeued or parent / stem
    parent.mkdir(parents=True, exist_ok=True)
    try:
        if requeued is None:
            folder.mkdir()
    except FileExistsError:
        folder = make_numbered(parent, stem)
    (folder / NOTE).write_text(json.dumps(_note(typed)), encoding="utf-8")
    return folder, requeued is None


def make_numbered(parent: Path, stem: str) -> Path:
    """Make the folder `<stem>_<n>` with the next free number; processes that do so together get different ones."""
    parent.mkdir(parents=True, exist_ok=True)
    number = max((number for number, _ in _numbered(parent, stem)), default=-1) + 1
    while True:
        try:
            (parent / f"{stem}_{number}").mkdir()
            return parent / f"{stem}_{number}"
        except FileExistsError:
            number += 1


def _numbered(parent: Path, stem: str) -> list[tuple[int, Path]]:
    numbers = [(path.name.removeprefix(f"{stem}_"), path) for path in parent.glob(f"{stem}_*")]
    return sorted((int(number), path) for number, path in numbers if number.isdigit())


def _note(typed: Typed) -> dict[str, Any]:
    """Return the command's words, its step in the job, and how often the job was restarted."""
    return {
        "words": typed.words,
        "step": os.environ.get("SLURM_STEP_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def _read_note(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
