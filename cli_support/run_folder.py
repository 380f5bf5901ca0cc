"""The folder of a run: `<save_dir>/<name>/<version>`, never one that already holds another run."""

import contextlib
import datetime
import fnmatch
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ..callbacks.checkpoints.checkpoint_io import newest_whole
from ..callbacks.checkpoints.saved_run import SHAPING, SavedRun, best_beside
from ..common.messages import say, warn
from . import slurm_job
from .command_line import Typed, UsageError
from .resume import KEYWORDS

# Tell the processes that Lightning's DDP launcher starts which folder the first one has claimed, and which checkpoint
# `last` or `best` was.
RUN_DIR_VARIABLE = "VLIGHTNING_RUN_DIR"
CHECKPOINT_VARIABLE = "VLIGHTNING_CHECKPOINT"
# Files that a run writes before its first batch.
_BEFORE_FIRST_BATCH = ("config*.yaml", "hparams.yaml", "metrics.csv", "events.out.tfevents.*", slurm_job.NOTE)
# Loggers that write to `<save_dir>/<name>/version_<n>`.
FOLDER_LOGGERS = ("TensorBoardLogger", "CSVLogger")


@dataclass
class Claimed:
    """The folder of a run.

    Args:
        folder: The folder.
        made: The folders that were created for it, itself first; empty if it existed.
        began: Whether a batch has gone through the model.
    """

    folder: Path
    made: list[Path]
    began: bool = False

    def begin(self) -> None:
        """Note that the run began, so that its folder stays."""
        self.began = True


_claimed: list[Claimed] = []


def shaping_settings(config: Any) -> dict[str, Any]:
    """Return the Trainer's settings that shape the result, plain data, without those left to the Trainer."""
    settings = {name: config.trainer.get(name) for name in SHAPING}
    if isinstance(settings["max_time"], datetime.timedelta):
        settings["max_time"] = {"seconds": int(settings["max_time"].total_seconds())}
    return {name: value for name, value in settings.items() if value is not None}


def name_run(config: Any, typed: Typed, saved: SavedRun | None) -> None:
    """Name the run after the first config file, or like the run of the checkpoint, unless a name was typed.

    `configs/albef/quickstart.yaml` gives `albef/quickstart`, a file elsewhere its stem; without a file and a checkpoint
    the name is `vlightning`. The logger's arguments in the configuration are changed in place.
    """
    arguments = _logger_arguments(config.trainer)
    if "name" in arguments and not typed.is_given("trainer.logger.init_args.name"):
        arguments["name"] = _default_name(typed, saved)
    if "save_dir" in arguments and saved is not None and not typed.is_given("trainer.logger.init_args.save_dir"):
        arguments["save_dir"] = _save_dir_of(saved) or arguments["save_dir"]


def run_name(config: Any, typed: Typed, saved: SavedRun | None) -> str:
    """Return the name of this run, after `name_run`."""
    return str(_logger_arguments(config.trainer).get("name") or _default_name(typed, saved))


def claim_run_dir(config: Any, typed: Typed, saved: SavedRun | None) -> Claimed | None:
    """Create the folder of this run, and put it into the logger's arguments and `default_root_dir`.

    A fresh start gets the next free `version_<n>`; under SLURM a `fit` gets `slurm_<job id>`, so that a requeued job
    finds its own folder and continues in it. An evaluation of a checkpoint in a run's folder gets one beside it,
    `<folder>_<subcommand>_<n>`. `default_root_dir` is the same folder, because Lightning writes and looks for the
    checkpoints of a requeue (`hpc_ckpt_<n>.ckpt`) there, whatever the subcommand.

    Returns:
        The folder that this process has claimed; None where another process has, or nothing is written.

    Raises:
        UsageError: If the typed version holds a run from which this one does not resume.
    """
    trainer = config.trainer
    if trainer.get("fast_dev_run"):
        return None
    arguments = _logger_arguments(trainer)
    beside = _evaluated_run(typed, saved)
    if beside is not None and "save_dir" in arguments:
        arguments["save_dir"], arguments["name"] = str(beside.parent), ""
    name = arguments.get("name", _default_name(typed, saved))
    parent = beside.parent if beside else Path(str(arguments.get("save_dir", "runs"))) / str(name or "")
    asked = _version_folder(arguments["version"]) if not beside and arguments.get("version") is not None else None
    claimed = None
    if not _is_first_process():
        # Another process claims the folder, and Lightning broadcasts its name.
        inherited = os.environ.get(RUN_DIR_VARIABLE) or (parent / asked if asked else None)
        run_dir = Path(inherited or slurm_job.requeued_folder(parent, typed) or parent)
    else:
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        if asked is not None:
            run_dir = parent / asked
            fresh = not run_dir.exists()
            if not fresh and any(run_dir.iterdir()) and not _resumes_in(run_dir, config, typed):
                raise UsageError(
                    f"The run folder {str(run_dir)!r} already holds a run; leave the version out for a new folder, or "
                    "resume with --ckpt_path from a checkpoint in it."
                )
        elif beside is not None:
            run_dir, fresh = slurm_job.numbered(parent, f"{beside.name}_{typed.subcommand}"), True
        else:
            run_dir, fresh = slurm_job.next_free(parent, typed)
        run_dir.mkdir(parents=True, exist_ok=True)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
        claimed = Claimed(run_dir, [run_dir, *missing] if fresh else [])
        _claimed.append(claimed)
        say(f"Run folder: {run_dir}")
    if slurm_job.is_requeued(typed):  # every process for itself, before any of them can write
        if any(run_dir.glob("hpc_ckpt_*.ckpt")):
            config["ckpt_path"] = None  # Lightning then takes the newest of these
        elif (run_dir / "checkpoints").is_dir() and (newest := whole_checkpoint(run_dir / "checkpoints")) is not None:
            config["ckpt_path"] = str(newest)
    if "save_dir" in arguments and run_dir != parent:
        number = run_dir.name.removeprefix("version_")
        arguments["version"] = int(number) if number.isdigit() else run_dir.name
    if trainer.get("default_root_dir") is None:
        trainer["default_root_dir"] = str(run_dir)
    return claimed


@contextlib.contextmanager
def run_dir_released() -> Iterator[None]:
    """On leaving, remove the folder if nothing was written to it, or if the run failed before its first batch."""
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
            written = {path.name for path in claimed.folder.rglob("*") if not path.is_dir()} - {slurm_job.NOTE}
            early = all(any(fnmatch.fnmatch(name, pattern) for pattern in _BEFORE_FIRST_BATCH) for name in written)
            if claimed.made and (not written or (failed and not claimed.began and early)):
                shutil.rmtree(claimed.folder, ignore_errors=True)
                for folder in claimed.made[1:]:
                    with contextlib.suppress(OSError):  # not empty
                        folder.rmdir()


def find_named_run(typed: Typed) -> Path | None:
    """Return the checkpoint for `--ckpt_path last` and `best`, of the newest run of the same name; else None.

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
    elif (own := slurm_job.requeued_folder(parent, typed)) is not None and _last_saved(own):
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
    """Return the newest checkpoint in a run's folder, or the best one if it keeps one, and print it.

    Raises:
        UsageError: If no checkpoint is whole.
    """
    newest = whole_checkpoint(run / "checkpoints")
    if newest is None:
        raise UsageError(f"There is no checkpoint in the run folder {str(run)!r}: give --ckpt_path another one.")
    path = (best_beside(newest) if best else None) or newest
    say(f"Checkpoint: {path}, the {'newest' if path == newest else 'best'} of its run.")
    return path


def whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in a folder, with a warning for each newer damaged one; None if it is empty.

    Raises:
        UsageError: If all are damaged.
    """
    newest, damaged = newest_whole(folder)
    for path, found in damaged.items():
        warn(f"The checkpoint {str(path)!r} is damaged ({found}).")
    if newest is None and damaged:
        raise UsageError(
            f"Found no whole checkpoint in {str(folder)!r} to go on from: start anew, or give --ckpt_path the file of "
            "another run."
        )
    if damaged:
        warn(f"Going on from {str(newest)!r}, the newest one that is whole.")
    return newest


def _last_saved(run: Path) -> float:
    """Return when the newest checkpoint in a run's folder was written, in seconds; 0 without one."""
    return max((path.stat().st_mtime for path in (run / "checkpoints").glob("*.ckpt")), default=0.0)


def _default_name(typed: Typed, saved: SavedRun | None) -> str:
    if not typed.config_files:
        return "vlightning" if saved is None or saved.name is None else saved.name
    path = typed.config_files[0].resolve().with_suffix("")
    inside = "configs" in path.parts
    return "/".join(path.parts[-path.parts[::-1].index("configs") :]) if inside else path.name


def _run_folder(saved: SavedRun) -> Path:
    """Return the folder of the run that wrote a checkpoint, if the checkpoint is still where it was written."""
    path = saved.path.absolute()
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def _save_dir_of(saved: SavedRun) -> str | None:
    """Return the folder of all runs that a checkpoint lies in, if it is still where it was written."""
    folder = _run_folder(saved).parent
    name = Path(saved.name).parts if saved.name is not None else ()
    inside = name and folder.parts[-len(name) :] == name
    return str(_shown(Path(*folder.parts[: -len(name)]))) if inside else None


def _evaluated_run(typed: Typed, saved: SavedRun | None) -> Path | None:
    """Return the run's folder beside which an evaluation of its checkpoint writes."""
    asked = [typed.is_given(f"trainer.logger.init_args.{name}", "option") for name in ("save_dir", "name", "version")]
    if saved is None or typed.subcommand == "fit" or any(asked):
        return None
    folder = _run_folder(saved)
    return _shown(folder) if (folder / "config.yaml").is_file() else None


def _shown(path: Path) -> Path:
    """Return a path as a user would write it: relative if it is below the working folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _logger_arguments(trainer: Any) -> Any:
    """Return the arguments of the one logger that writes into a version folder, or an empty dict."""
    logger = trainer.get("logger")
    one = hasattr(logger, "get") and str(logger.get("class_path", "")).rsplit(".", 1)[-1] in FOLDER_LOGGERS
    return logger.init_args if one else {}


def _version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)


def _resumes_in(run_dir: Path, config: Any, typed: Typed) -> bool:
    checkpoint = config.get("ckpt_path")
    if checkpoint is None:
        return slurm_job.is_requeued(typed)
    if checkpoint in KEYWORDS:
        return any(run_dir.rglob("*.ckpt"))
    return run_dir.resolve() in Path(str(checkpoint)).resolve().parents


def _is_first_process() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0 and all(
        os.environ.get(name, "0") == "0" for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
    )
