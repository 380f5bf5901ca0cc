"""The run folder `<save_dir>/<name>/<version>`, which is never the folder of another run."""

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ..callbacks.checkpoints.run_checkpoints import last_saved, resolved, whole_checkpoint
from ..callbacks.checkpoints.saved_run import SavedRun
from ..common.errors import UserError
from ..common.messages import say
from ..common.names import did_you_mean
from ..common.slurm_job import NOTE, is_requeued, make_numbered, next_free, requeued_folder
from ..common.typed_values import Typed
from ..common.wandb_run import ID_FILE, check_wandb, place_wandb_run

# Pass the run folder and the checkpoint of the first process to the processes that Lightning's DDP launcher starts.
RUN_DIR_VARIABLE = "VLIGHTNING_RUN_DIR"
CHECKPOINT_VARIABLE = "VLIGHTNING_CHECKPOINT"
# Files that a run writes before its first batch.
_EARLY = ("config*.yaml", "environment*.json", "hparams.yaml", "metrics.csv", "events.out.tfevents.*", NOTE, ID_FILE)


def name_run(config: Any, typed: Typed, saved: SavedRun | None) -> str:
    """Determine the name of the run, and set the logger's arguments to it.

    A given name is used. Otherwise the name is that of the first config file: `albef/quickstart` for
    `configs/albef/quickstart.yaml`, the stem for a file elsewhere. Without a config file it is the name of the
    checkpoint's run, or else `vlightning`.

    Args:
        config: The parsed configuration of the subcommand, which is changed in place.
        typed: The parts of the command line.
        saved: The values of the checkpoint; None without one.
    """
    check_wandb(config)
    arguments, name = _logger_arguments(config.trainer), _default_name(typed, saved)
    if "name" in arguments and not typed.is_given("trainer.logger.init_args.name"):
        arguments["name"] = name
    if "save_dir" in arguments and saved is not None and not typed.is_given("trainer.logger.init_args.save_dir"):
        arguments["save_dir"] = str(saved.save_dir or arguments["save_dir"])
    return str(arguments.get("name") or name)


@contextlib.contextmanager
def claimed(config: Any, name: str, typed: Typed, saved: SavedRun | None) -> Iterator[Callable[[], None]]:
    """Create the folder of this run, and put it into the logger's arguments and `default_root_dir`.

    A new run gets the next free `version_<n>`. Under SLURM a `fit` gets `slurm_<job id>`, so that a requeued job finds
    its folder and continues in it. An evaluation of a checkpoint in a run folder gets `<run folder>_<subcommand>_<n>`.
    `default_root_dir` is the same folder, since Lightning writes and reads the checkpoints of a requeue
    (`hpc_ckpt_<n>.ckpt`) there for any subcommand. On exit, a new folder is removed if it is empty, or if the run
    failed before its first batch.

    Args:
        config: The parsed configuration of the subcommand, which is changed in place.
        name: The name of the run.
        typed: The parts of the command line.
        saved: The values of the checkpoint; None without one.

    Yields:
        A function to call after the first batch.

    Raises:
        UserError: If the given version holds a run, and this run does not resume from it.
    """
    state = {"began": False, "failed": True}
    made = [] if config.trainer.get("fast_dev_run") else _claim(config, name, typed, saved)
    try:
        yield lambda: state.update(began=True)
        state["failed"] = False
    finally:
        for variable in (RUN_DIR_VARIABLE, CHECKPOINT_VARIABLE):
            os.environ.pop(variable, None)
        if made:
            written = {path.name for path in made[0].rglob("*") if not path.is_dir()} - {NOTE, ID_FILE}
            early = all(any(fnmatch.fnmatch(name, pattern) for pattern in _EARLY) for name in written)
            if not written or (state["failed"] and not state["began"] and early):
                shutil.rmtree(made[0], ignore_errors=True)
                for folder in made[1:]:
                    with contextlib.suppress(OSError):  # not empty
                        folder.rmdir()


def _claim(config: Any, name: str, typed: Typed, saved: SavedRun | None) -> list[Path]:
    """Return the created folders, the run folder first; empty if another process creates them."""
    trainer = config.trainer
    arguments = _logger_arguments(trainer)
    made: list[Path] = []
    parent = Path(arguments.get("save_dir", "runs")) / (arguments.get("name", name) or "")
    version = arguments.get("version")
    beside = _evaluated_run(typed, saved)
    if beside is not None:
        parent, version = beside.parent, None
        if "save_dir" in arguments:
            arguments["save_dir"], arguments["name"] = str(parent), ""
    asked = None if version is None else parent / _version_folder(version)
    if not _is_first_process():  # another process creates the folder, and Lightning broadcasts its name
        inherited = os.environ.get(RUN_DIR_VARIABLE) or asked
        run_dir = Path(inherited or requeued_folder(parent, typed) or parent)
    else:
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        fresh = True
        if asked is not None:
            run_dir, fresh = asked, not asked.exists()
            checkpoint = config.get("ckpt_path")
            resumes = run_dir.resolve() in Path(checkpoint).resolve().parents if checkpoint else is_requeued(typed)
            if not fresh and any(run_dir.iterdir()) and not resumes:
                raise UserError(
                    f"Expected an empty run folder, got {str(run_dir)!r}, which holds a run: leave the version out for "
                    "a new folder, or resume with --ckpt_path from a checkpoint in this folder."
                )
        elif beside is not None:
            run_dir = make_numbered(parent, f"{beside.name}_{typed.subcommand}")
        else:
            run_dir, fresh = next_free(parent, typed)
        run_dir.mkdir(parents=True, exist_ok=True)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
        made = [run_dir, *missing] if fresh else []
        say(f"Run folder: {run_dir}")
    if is_requeued(typed):  # in each process, before any process can write
        if any(run_dir.glob("hpc_ckpt_*.ckpt")):
            config["ckpt_path"] = None  # Lightning then uses the newest of these checkpoints
        elif newest := whole_checkpoint(run_dir / "checkpoints"):
            config["ckpt_path"] = str(newest)
    if "save_dir" in arguments and run_dir != parent:
        number = run_dir.name.removeprefix("version_")
        arguments["version"] = int(number) if number.isdigit() else run_dir.name
    if trainer.get("default_root_dir") is None:
        trainer["default_root_dir"] = str(run_dir)
    place_wandb_run(config, typed, run_dir, _is_first_process())
    return made


def find_checkpoint(typed: Typed) -> Path | None:
    """Find the checkpoint that `--ckpt_path` names: a file, a sharded folder, a run folder, `last` or `best`.

    Returns:
        The path of the checkpoint; None if none was given, and for values that Lightning resolves.

    Raises:
        UserError: If the checkpoint does not exist.
    """
    name = typed.lookup("ckpt_path")
    if not isinstance(name, str) or name == "hpc" or "://" in name or name.startswith("registry"):
        return None
    if not _is_first_process() and (found := os.environ.get(CHECKPOINT_VARIABLE)):
        return Path(found)
    path, best = Path(name), typed.subcommand != "fit"
    if name in ("last", "best"):
        path, best = _newest_run(typed), name == "best"
    elif not path.exists():
        folder = next(parent for parent in path.parents if parent.is_dir())
        near = [str(each) for each in folder.glob("*.ckpt" if str(folder) in (".", "/") else "**/*.ckpt")]
        hint = did_you_mean(name, near) if near else f"there is no .ckpt file under {str(folder)!r}."
        raise UserError(f"Expected a checkpoint, got {name!r}, which does not exist: {hint}")
    path = resolved(path, best)
    os.environ[CHECKPOINT_VARIABLE] = str(path)
    return path


def resolve_weights(values: Any) -> None:
    """Replace each run's folder that is given as `weights`, of the module or of a part, by its checkpoint.

    Args:
        values: The arguments of the module, which are changed in place.
    """
    for name, value in list(vars(values).items()):
        if name == "weights" and isinstance(value, str):
            values[name] = str(path) if (path := resolved(value)) != Path(value).expanduser() else value
        elif isinstance(value, Namespace):
            resolve_weights(value)


def _newest_run(typed: Typed) -> Path:
    """Return the newest run of the same name that has a checkpoint, for `--ckpt_path last` and `best`."""
    logger = {name: typed.lookup(f"trainer.logger.init_args.{name}") for name in ("save_dir", "name", "version")}
    parent = Path(str(logger["save_dir"] or "runs")) / str(logger["name"] or _default_name(typed, None))
    runs = sorted(parent.glob("*"), key=last_saved)
    if logger["version"] is not None:
        runs = [parent / _version_folder(logger["version"])]
    elif (own := requeued_folder(parent, typed)) is not None and last_saved(own):
        runs = [own]
    if not runs or not last_saved(runs[-1]):
        place = runs[-1] if logger["version"] is not None else parent
        raise UserError(
            f"Expected a run with a checkpoint in {str(place)!r} for --ckpt_path {typed.lookup('ckpt_path')}, got "
            "none: leave the option out for a new run, or name the checkpoint file."
        )
    return runs[-1]


def _default_name(typed: Typed, saved: SavedRun | None) -> str:
    if not typed.config_files:
        return "vlightning" if saved is None or saved.name is None else saved.name
    path = typed.config_files[0].resolve().with_suffix("")
    return "/".join(path.parts[-path.parts[::-1].index("configs") :]) if "configs" in path.parts else path.name


def _evaluated_run(typed: Typed, saved: SavedRun | None) -> Path | None:
    """Return the run folder of the checkpoint that is evaluated; None if the evaluation writes elsewhere."""
    asked = [typed.origin(f"trainer.logger.init_args.{name}") for name in ("save_dir", "name", "version")]
    if saved is None or typed.subcommand == "fit" or any(str(origin).startswith("--") for origin in asked):
        return None
    return saved.folder if (saved.folder / "config.yaml").is_file() else None


def _logger_arguments(trainer: Any) -> Any:
    """Return the arguments of the logger if it writes to `<save_dir>/<name>/version_<n>`, or else an empty dict."""
    logger = trainer.get("logger")
    name = str(logger.get("class_path", "")).rpartition(".")[2] if hasattr(logger, "get") else ""
    return logger.init_args if name in ("TensorBoardLogger", "CSVLogger") else {}


def _version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)


def _is_first_process() -> bool:
    """Return whether this process is the first of the run."""
    return getattr(rank_zero_only, "rank", 0) == 0 and all(
        os.environ.get(name, "0") == "0" for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
    )
