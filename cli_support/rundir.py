"""The folder of a run: `<save_dir>/<name>/<version>`, never one that already holds another run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ..callbacks.checkpoint_io import newest_whole
from .report import tell
from .resume import KEYWORDS
from .typed import Typed, UsageError

# Tells the processes that Lightning's DDP launcher starts which folder the first one has claimed.
RUN_DIR_VARIABLE = "VLIGHTNING_RUN_DIR"
# Loggers that write to `<save_dir>/<name>/version_<n>`.
FOLDER_LOGGERS = ("TensorBoardLogger", "CSVLogger")


def name_run(config: Any, typed: Typed) -> None:
    """Name the run after the first config file, unless a name was typed.

    `configs/albef/quickstart.yaml` gives `albef/quickstart`, a file elsewhere its stem, no file `vlightning`.

    Args:
        config: The parsed configuration of the subcommand; the logger's arguments are changed in place.
        typed: What was typed.
    """
    arguments = _logger_arguments(config.trainer)
    if "name" not in arguments or typed.is_given("trainer.logger.init_args.name"):
        return
    arguments["name"] = _name_from_config(typed)


def claim_run_dir(config: Any, typed: Typed) -> None:
    """Choose the folder of this run, create it, and put it into the logger's arguments and `default_root_dir`.

    A fresh start gets the next free `version_<n>`; under SLURM a `fit` gets `slurm_<job id>`, so that a requeued job
    finds its own folder again and goes on in it. `default_root_dir` is the same folder, because that is where
    Lightning writes and looks for the checkpoints of a requeue (`hpc_ckpt_<n>.ckpt`), whatever the subcommand.

    Args:
        config: The parsed configuration of the subcommand; changed in place.
        typed: What was typed.

    Raises:
        UsageError: If a version was asked for that holds a run, and this run does not resume from it.
    """
    trainer = config.trainer
    if trainer.get("fast_dev_run"):
        return
    arguments = _logger_arguments(trainer)
    parent = Path(str(arguments.get("save_dir", "runs"))) / str(arguments.get("name", _name_from_config(typed)) or "")
    asked = arguments.get("version")
    inherited = os.environ.get(RUN_DIR_VARIABLE)
    if not _is_first_process():
        # Another process claims the folder; Lightning broadcasts its name. Ours only has to agree where it is known.
        if inherited:
            run_dir = Path(inherited)
        elif asked is not None:
            run_dir = parent / _version_folder(asked)
        else:
            run_dir = _next_free(parent, "fit") if typed.subcommand == "fit" and _requeued() else parent
    else:
        if asked is not None:
            run_dir = parent / _version_folder(asked)
            if _holds_a_run(run_dir) and not _resumes_in(run_dir, config):
                raise UsageError(
                    f"The run folder {str(run_dir)!r} already holds a run; leave the version out for a new folder, or "
                    "resume with --ckpt_path from a checkpoint in it."
                )
        else:
            run_dir = _next_free(parent, str(typed.subcommand))
        run_dir.mkdir(parents=True, exist_ok=True)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
    # Every process by itself, before any of them can write.
    _continue_from_last(run_dir, config, str(typed.subcommand))
    if "save_dir" in arguments and run_dir != parent:
        number = run_dir.name.removeprefix("version_")
        arguments["version"] = int(number) if number.isdigit() else run_dir.name
    if trainer.get("default_root_dir") is None:
        trainer["default_root_dir"] = str(run_dir)


@contextlib.contextmanager
def run_dir_released() -> Iterator[None]:
    """On leaving, forget the folder, and remove it if nothing was written, as when the run stopped before it began."""
    try:
        yield
    finally:
        if _is_first_process():
            run_dir = os.environ.pop(RUN_DIR_VARIABLE, None)
            if run_dir and Path(run_dir).is_dir() and not any(Path(run_dir).iterdir()):
                Path(run_dir).rmdir()


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


def _resumes_in(run_dir: Path, config: Any) -> bool:
    checkpoint = config.get("ckpt_path")
    if checkpoint is None:
        return _requeued()
    if checkpoint in KEYWORDS:
        return any(run_dir.rglob("*.ckpt"))
    return run_dir.resolve() in Path(str(checkpoint)).resolve().parents


def _next_free(parent: Path, subcommand: str) -> Path:
    """A folder that did not exist, created here so that of two runs started together each gets its own."""
    stem = "version"
    if SLURMEnvironment.detect():
        job = f"slurm_{SLURMEnvironment.job_id()}"
        stem = job if subcommand == "fit" else f"{job}_{subcommand}"
        if subcommand == "fit" and (_requeued() or not (parent / stem).exists()):
            return parent / stem
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


def _continue_from_last(run_dir: Path, config: Any, subcommand: str) -> None:
    """Let `last`, and a requeued job, go on from the checkpoint of this run that was written last and is whole."""
    checkpoint = config.get("ckpt_path")
    requeued = checkpoint is None and subcommand == "fit" and _requeued() and not any(run_dir.glob("hpc_ckpt_*.ckpt"))
    folder = run_dir / "checkpoints"
    if not (requeued or checkpoint == "last") or not folder.is_dir():
        return
    newest, damaged = newest_whole(folder)
    for path, found in damaged.items():
        tell(f"The checkpoint {str(path)!r} is damaged ({found}).")
    if newest is not None:
        config["ckpt_path"] = str(newest)
        if damaged:
            tell(f"Going on from {str(newest)!r}, the newest one that is whole.")
    elif damaged:
        raise UsageError(
            f"Found no whole checkpoint in {str(folder)!r} to go on from: start anew, or give --ckpt_path the file of "
            "another run."
        )


def _requeued() -> bool:
    return SLURMEnvironment.detect() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def _is_first_process() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0 and all(
        os.environ.get(name, "0") == "0" for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
    )
