"""Numbered folders of runs, and those of jobs: a job that is started again finds the folder of each of its commands.

SLURM names a job and says how often it was started. Other engines (torchrun, Kubernetes, Ray, SkyPilot, Modal) start
the same command again: the job then has the name in `VLIGHTNING_JOB`, which their templates set.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.plugins.environments import SLURMEnvironment

from ...common.errors import UserError
from .typed_values import Typed

# File in the folder of a job that names the command of the job to which the folder belongs.
NOTE = ".job.json"
JOB_VARIABLE = "VLIGHTNING_JOB"


class Job(NamedTuple):
    """A job that may be started again.

    Attributes:
        folder: Name of the run folder of its first command.
        restarted: Whether it may have been started before.
        restart: Number of the starts before this one, as SLURM says; None elsewhere.
    """

    folder: str
    restarted: bool
    restart: str | None


def current_job() -> Job | None:
    """Return the job that this process belongs to; None if it belongs to none.

    Raises:
        UserError: If `VLIGHTNING_JOB` is no name of a folder.
    """
    if name := os.environ.get(JOB_VARIABLE):
        if not re.fullmatch(r"\w[\w.+=@-]*", name) or re.fullmatch(r"version_\d+", name):
            raise UserError(
                f"Expected letters, digits, dots and dashes in the variable {JOB_VARIABLE}, which names the run's "
                f"folder, got {name!r}: correct it."
            )
        return Job(name, True, None)
    if SLURMEnvironment.detect():
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        return Job(f"slurm_{SLURMEnvironment.job_id()}", int(restart) > 0, restart)
    return None


def is_requeued(typed: Typed) -> bool:
    """Return whether this is a `fit` in a job that may have been started before."""
    job = current_job()
    return job is not None and job.restarted and typed.subcommand == "fit"


def requeued_folder(parent: Path, typed: Typed) -> Path | None:
    """Return the folder in `parent` that this command claimed when its job was started before; None if it has none.

    A job may run several commands, also of one config at a time. Each notes its words in its folder; commands with
    the same words differ in the job's step.
    """
    job = current_job()
    if job is None or not is_requeued(typed):
        return None
    stem = job.folder
    folders = [parent / stem, *(folder for _, folder in _numbered(parent, stem))]
    notes = {folder: _read_note(folder) for folder in folders if folder.is_dir()}
    note_of_command = _note(typed)
    for names in (("words", "step"), ("words",)):
        for folder, note in notes.items():
            if all(note.get(name) == note_of_command[name] for name in names):
                return folder
    if job.restart is None:  # the commands of a start and of the next cannot be told apart
        return None
    unclaimed = [folder for folder, note in notes.items() if note.get("restart") != note_of_command["restart"]]
    # The job's only command may have other words than before.
    return unclaimed[0] if len(notes) == len(unclaimed) == 1 else None


def next_free(parent: Path, typed: Typed) -> tuple[Path, bool]:
    """Make a new folder in `parent`, or return that of this command in a requeued job; and whether it is new."""
    job = current_job()
    if job is None:
        return make_numbered(parent, "version"), True
    stem = job.folder
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
