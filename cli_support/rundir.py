"""The folder of a run: `<save_dir>/<name>/<version>`, never one that already holds another run."""

import contextlib
import fnmatch
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ..callbacks.checkpoints.checkpoint_io import newest_whole
from .command_line import Typed, UsageError
from .report import say, tell
from .resume import KEYWORDS, Saved, best_beside
from .save_config import Claimed

# Tells the processes that Lightning's DDP launcher starts which folder the first one has claimed.
RUN_DIR_VARIABLE = "VLIGHTNING_RUN_DIR"
# Tells them which checkpoint `last` and `best` were.
CHECKPOINT_VARIABLE = "VLIGHTNING_CHECKPOINT"
# Says in the folder of a SLURM job which of its commands the folder belongs to.
_JOB_FILE = ".slurm.json"
# What a run writes before its first batch.
_OF_START = ("config*.yaml", "hparams.yaml", "metrics.csv", "events.out.tfevents.*", _JOB_FILE)
_claimed: list[Claimed] = []
# Loggers that write to `<save_dir>/<name>/version_<n>`.
FOLDER_LOGGERS = ("TensorBoardLogger", "CSVLogger")


def name_run(config: Any, typed: Typed, saved: Saved | None) -> None:
    """Name the run after the first config file, or like the run of the checkpoint, unless a name was typed.

    `configs/albef/quickstart.yaml` gives `albef/quickstart`, a file elsewhere its stem; without a file and a checkpoint
    it is `vlightning`.

    Args:
        config: The parsed configuration of the subcommand; the logger's arguments are changed in place.
        typed: What was typed.
        saved: What the checkpoint says; None without one.
    """
    arguments = _logger_arguments(config.trainer)
    if "name" in arguments and not typed.is_given("trainer.logger.init_args.name"):
        arguments["name"] = _default_name(typed, saved)
    if "save_dir" in arguments and saved is not None and not typed.is_given("trainer.logger.init_args.save_dir"):
        arguments["save_dir"] = _save_dir_of(saved) or arguments["save_dir"]


def run_name(config: Any, typed: Typed, saved: Saved | None) -> str:
    """The name of this run, which its checkpoints hold; see `name_run`, after which it is called."""
    return str(_logger_arguments(config.trainer).get("name") or _default_name(typed, saved))


def claim_run_dir(config: Any, typed: Typed, saved: Saved | None) -> Claimed | None:
    """Choose the folder of this run, create it, and put it into the logger's arguments and `default_root_dir`.

    A fresh start gets the next free `version_<n>`; under SLURM a `fit` gets `slurm_<job id>`, so that a requeued job
    finds its own folder again and goes on in it. An evaluation of a checkpoint in a run's folder gets one beside it,
    `<folder>_<subcommand>_<n>`. `default_root_dir` is the same folder, because that is where Lightning writes and looks
    for the checkpoints of a requeue (`hpc_ckpt_<n>.ckpt`), whatever the subcommand.

    Args:
        config: The parsed configuration of the subcommand; changed in place.
        typed: What was typed.
        saved: What the checkpoint says; None without one.

    Returns:
        The folder that this process has claimed; None where another one has, or nothing is written.

    Raises:
        UsageError: If a version was asked for that holds a run, and this run does not resume from it.
    """
    trainer = config.trainer
    if trainer.get("fast_dev_run"):
        return None
    arguments = _logger_arguments(trainer)
    beside = _evaluated_run(typed, saved)
    if beside is not None:
        parent = beside.parent
        if "save_dir" in arguments:
            arguments["save_dir"], arguments["name"] = str(parent), ""
    else:
        name = arguments.get("name", _default_name(typed, saved))
        parent = Path(str(arguments.get("save_dir", "runs"))) / str(name or "")
    asked = arguments.get("version") if beside is None else None
    inherited = os.environ.get(RUN_DIR_VARIABLE)
    claimed = None
    if not _is_first_process():
        # Another process claims the folder; Lightning broadcasts its name. Ours only has to agree where it is known.
        if inherited:
            run_dir = Path(inherited)
        elif asked is not None:
            run_dir = parent / _version_folder(asked)
        else:
            run_dir = (own_folder(parent, typed) if _requeued(typed) else None) or parent
    else:
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        if asked is not None:
            run_dir = parent / _version_folder(asked)
            if _holds_a_run(run_dir) and not _resumes_in(run_dir, config, typed):
                raise UsageError(
                    f"The run folder {str(run_dir)!r} already holds a run; leave the version out for a new folder, or "
                    "resume with --ckpt_path from a checkpoint in it."
                )
            fresh = not run_dir.exists()
        elif beside is not None:
            run_dir, fresh = _numbered(parent, f"{beside.name}_{typed.subcommand}"), True
        else:
            run_dir, fresh = _next_free(parent, typed)
        run_dir.mkdir(parents=True, exist_ok=True)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
        claimed = Claimed(run_dir, [run_dir, *missing] if fresh else [])
        _claimed.append(claimed)
        say(f"Run folder: {run_dir}")
    # Every process by itself, before any of them can write.
    _continue_after_requeue(run_dir, config, typed)
    if "save_dir" in arguments and run_dir != parent:
        number = run_dir.name.removeprefix("version_")
        arguments["version"] = int(number) if number.isdigit() else run_dir.name
    if trainer.get("default_root_dir") is None:
        trainer["default_root_dir"] = str(run_dir)
    return claimed


@contextlib.contextmanager
def run_dir_released() -> Iterator[None]:
    """On leaving, forget the folder, and remove it if nothing was written, or the run failed before it began."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if _is_first_process():
            os.environ.pop(RUN_DIR_VARIABLE, None)
            os.environ.pop(CHECKPOINT_VARIABLE, None)
        while _claimed:
            claimed = _claimed.pop()
            written = {path.name for path in claimed.folder.rglob("*") if not path.is_dir()} - {_JOB_FILE}
            of_start = all(any(fnmatch.fnmatch(name, pattern) for pattern in _OF_START) for name in written)
            if claimed.made and (not written or (failed and not claimed.began and of_start)):
                shutil.rmtree(claimed.folder, ignore_errors=True)
                for folder in claimed.made[1:]:
                    if folder.is_dir() and not any(folder.iterdir()):
                        folder.rmdir()


def find_named_run(typed: Typed) -> Path | None:
    """The checkpoint for `--ckpt_path last` and `best`, out of the newest run of the same name.

    Args:
        typed: What was typed.

    Returns:
        Its path; None if `--ckpt_path` is something else.

    Raises:
        UsageError: If there is no such run, or no whole checkpoint in it.
    """
    word = typed.lookup("ckpt_path")
    if word not in ("last", "best"):
        return None
    if chosen := os.environ.get(CHECKPOINT_VARIABLE):
        return Path(chosen)
    logger = {name: typed.lookup(f"trainer.logger.init_args.{name}") for name in ("save_dir", "name", "version")}
    parent = Path(str(logger["save_dir"] or "runs")) / str(logger["name"] or _default_name(typed, None))
    runs = sorted(parent.glob("*"), key=_last_saved)
    if logger["version"] is not None:
        runs = [parent / _version_folder(logger["version"])]
    elif _requeued(typed) and (own := own_folder(parent, typed)) is not None and _last_saved(own):
        runs = [own]
    if not runs or not _last_saved(runs[-1]):
        place = runs[-1] if logger["version"] is not None else parent
        raise UsageError(
            f"--ckpt_path {word} is a checkpoint of the newest run of this name, but there is none in {str(place)!r}: "
            "leave it out to start anew, or give the file."
        )
    path = checkpoint_of(runs[-1], best=word == "best")
    if _is_first_process():
        os.environ[CHECKPOINT_VARIABLE] = str(path)
    return path


def checkpoint_of(run: Path, best: bool) -> Path:
    """The best or the newest checkpoint in a run's folder, which is said in a line.

    Args:
        run: The folder.
        best: Whether the best one by the run's metric is meant, where it keeps one.

    Returns:
        The file, or the folder of a sharded one.

    Raises:
        UsageError: If there is none that is whole.
    """
    newest = whole_checkpoint(run / "checkpoints")
    if newest is None:
        raise UsageError(f"There is no checkpoint in the run folder {str(run)!r}: give --ckpt_path another one.")
    path = (best_beside(newest) if best else None) or newest
    say(f"Checkpoint: {path}, the {'newest' if path == newest else 'best'} of its run.")
    return path


def whole_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder; damaged ones are passed over with a line.

    Args:
        folder: The folder.

    Returns:
        Its path; None if there is none at all.

    Raises:
        UsageError: If there are only damaged ones.
    """
    newest, damaged = newest_whole(folder)
    for path, found in damaged.items():
        tell(f"The checkpoint {str(path)!r} is damaged ({found}).")
    if newest is None and damaged:
        raise UsageError(
            f"Found no whole checkpoint in {str(folder)!r} to go on from: start anew, or give --ckpt_path the file of "
            "another run."
        )
    if damaged:
        tell(f"Going on from {str(newest)!r}, the newest one that is whole.")
    return newest


def own_folder(parent: Path, typed: Typed) -> Path | None:
    """The folder that this command claimed when its SLURM job was started before.

    A job may run several commands, also of one config at a time. Each notes in its folder what it is; commands that do
    not differ in a word differ in the job's step.

    Args:
        parent: Where the folders of this name are.
        typed: What was typed.

    Returns:
        The folder; None if this command has none.
    """
    stem = f"slurm_{SLURMEnvironment.job_id()}"
    folders = sorted(parent.glob(f"{stem}_*"), key=lambda path: (len(path.name), path.name))
    folders = [parent / stem, *(path for path in folders if path.name.removeprefix(f"{stem}_").isdigit())]
    folders = [path for path in folders if path.is_dir()]
    mine = _of_command(typed)
    notes = [_note_in(folder) for folder in folders]
    for names in (("words", "step"), ("words",)):
        for folder, note in zip(folders, notes, strict=True):
            if all(note.get(name) == mine[name] for name in names):
                return folder
    # The only command of the job, with other words than before.
    return folders[0] if len(folders) == 1 and notes[0].get("restart") != mine["restart"] else None


def _note_in(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads((folder / _JOB_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _of_command(typed: Typed) -> dict[str, Any]:
    """What tells the commands of a job apart, and in which of its starts this is."""
    of_job = {"step": os.environ.get("SLURM_STEP_ID"), "restart": os.environ.get("SLURM_RESTART_COUNT", "0")}
    return {"words": typed.args, **of_job}


def _last_saved(run: Path) -> float:
    """When the newest checkpoint in a run's folder was written, seconds; 0 without one."""
    return max((path.stat().st_mtime for path in (run / "checkpoints").glob("*.ckpt")), default=0.0)


def _default_name(typed: Typed, saved: Saved | None) -> str:
    if not typed.config_files and saved is not None and saved.name is not None:
        return saved.name
    return _name_from_config(typed)


def _run_folder(saved: Saved) -> Path:
    """The folder of the run that wrote a checkpoint, if the checkpoint is still where it was written."""
    path = saved.path.absolute()
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def _save_dir_of(saved: Saved) -> str | None:
    """The folder of all runs that a checkpoint lies in, if it is still where it was written."""
    folder = _run_folder(saved).parent
    name = Path(saved.name).parts if saved.name is not None else ()
    if not name or folder.parts[-len(name) :] != name:
        return None
    return _shown(Path(*folder.parts[: -len(name)]))


def _evaluated_run(typed: Typed, saved: Saved | None) -> Path | None:
    """The run's folder beside which an evaluation of its checkpoint writes."""
    if saved is None or typed.subcommand == "fit":
        return None
    folder = _run_folder(saved)
    asked = any(
        typed.is_given(f"trainer.logger.init_args.{name}", "option") for name in ("save_dir", "name", "version")
    )
    return None if asked or not (folder / "config.yaml").is_file() else Path(_shown(folder))


def _shown(path: Path) -> str:
    """A path as a user would write it: relative where it is below the working folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _name_from_config(typed: Typed) -> str:
    if not typed.config_files:
        return "vlightning"
    path = typed.config_files[0].resolve().with_suffix("")
    inside = "configs" in path.parts
    return "/".join(path.parts[-path.parts[::-1].index("configs") :]) if inside else path.name


def _logger_arguments(trainer: Any) -> Any:
    """Arguments of the one logger that writes into a version folder, or an empty dict."""
    logger = trainer.get("logger")
    if hasattr(logger, "get") and str(logger.get("class_path", "")).rsplit(".", 1)[-1] in FOLDER_LOGGERS:
        return logger.init_args
    return {}


def _version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)


def _holds_a_run(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _resumes_in(run_dir: Path, config: Any, typed: Typed) -> bool:
    checkpoint = config.get("ckpt_path")
    if checkpoint is None:
        return _requeued(typed)
    if checkpoint in KEYWORDS:
        return any(run_dir.rglob("*.ckpt"))
    return run_dir.resolve() in Path(str(checkpoint)).resolve().parents


def _next_free(parent: Path, typed: Typed) -> tuple[Path, bool]:
    """A folder that did not exist, or that of this command in a requeued job; and whether it is a new one."""
    if not SLURMEnvironment.detect():
        return _numbered(parent, "version"), True
    stem = f"slurm_{SLURMEnvironment.job_id()}"
    if typed.subcommand != "fit":
        return _numbered(parent, f"{stem}_{typed.subcommand}"), True
    own = own_folder(parent, typed) if _requeued(typed) else None
    folder = own or parent / stem
    parent.mkdir(parents=True, exist_ok=True)
    try:
        if own is None:
            folder.mkdir()
    except FileExistsError:
        folder = _numbered(parent, stem)
    (folder / _JOB_FILE).write_text(json.dumps(_of_command(typed)), encoding="utf-8")
    return folder, own is None


def _numbered(parent: Path, stem: str) -> Path:
    """A folder that did not exist, created here so that of two runs started together each gets its own."""
    parent.mkdir(parents=True, exist_ok=True)
    taken = [p.name.removeprefix(f"{stem}_") for p in parent.glob(f"{stem}_*")]
    number = max((int(n) for n in taken if n.isdigit()), default=-1) + 1
    while True:
        try:
            (parent / f"{stem}_{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / f"{stem}_{number}"


def _continue_after_requeue(run_dir: Path, config: Any, typed: Typed) -> None:
    """Let a requeued job go on from the checkpoint of this run that was written last, whatever it had started from."""
    if not _requeued(typed):
        return
    if any(run_dir.glob("hpc_ckpt_*.ckpt")):
        config["ckpt_path"] = None  # Lightning then takes the newest of these
    elif (run_dir / "checkpoints").is_dir() and (newest := whole_checkpoint(run_dir / "checkpoints")) is not None:
        config["ckpt_path"] = str(newest)


def _requeued(typed: Typed) -> bool:
    again = SLURMEnvironment.detect() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    return again and typed.subcommand == "fit"


def _is_first_process() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0 and all(
        os.environ.get(name, "0") == "0" for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
    )
