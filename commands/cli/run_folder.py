"""The run folder `<save_dir>/<name>/<version>`, which is never the folder of another run."""

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ...common.errors import UserError
from ...common.messages import say
from ...common.names import did_you_mean, nearest_path
from .jobs import NOTE, is_requeued, make_numbered, next_free, requeued_folder
from .listing import PACKAGE_ROOT
from .saved_run import SavedRun, best_of, last_saved, newest_checkpoint, resolved, step_of
from .typed_values import Typed, at

# Pass the run folder and the checkpoint of the first process to the processes that Lightning's DDP launcher starts.
RUN_DIR_VARIABLE = "VLIGHTNING_RUN_DIR"
CHECKPOINT_VARIABLE = "VLIGHTNING_CHECKPOINT"
# File in a run folder that holds the id of its W&B run: a requeued job goes on in it.
ID_FILE = ".wandb_id"
_WEIGHTS_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")
# Files that a run writes before its first batch.
_EARLY = ("config*.yaml", "environment*.json", "hparams.yaml", "metrics.csv", "events.out.tfevents.*", NOTE, ID_FILE)


def name_run(config: Any, typed: Typed, saved: SavedRun | None) -> str:
    """Determine the name of the run, and set the logger's arguments to it.

    A given option is used. Otherwise the name is that of the first config file: the logger's name in it, or else
    `albef/quickstart` for `configs/albef/quickstart.yaml` and the stem for a file elsewhere. A later file makes another
    run of it, and so another name, if it has a logger's name or a line `needs`. The user's own file after shipped ones
    adds its name (`albef_quickstart_mine`), unless it only says which data is read: recipes name the runs of others,
    whatever the data. Without a config file it is the name of the checkpoint's run, or else `vlightning`.

    Raises:
        UserError: If the run logs to W&B, whose package is not installed.
    """
    if _wandb_loggers(config) and find_spec("wandb") is None:
        raise UserError(
            "Expected the package wandb for trainer.logger WandbLogger, got none: pip install 'vlightning[wandb]'."
        )
    name = _run_name(typed, saved)
    for logger in loggers(config.trainer):
        if logger.init_args.get("name") is not None:
            logger.init_args["name"] = name
    for arguments in folder_arguments(config.trainer):
        arguments["save_dir"] = str(_save_dir(typed, saved))
    return name


@contextlib.contextmanager
def claimed(config: Any, name: str, typed: Typed, saved: SavedRun | None) -> Iterator[Callable[[], None]]:
    """Create the folder of this run, and put it into the logger's arguments and `default_root_dir`.

    The folder is the same for any logger, for several, and for none. The folder of all runs is the logger's `save_dir`
    if it is given, or else `default_root_dir`.

    A new run gets the next free `version_<n>`. Under SLURM a `fit` gets `slurm_<job id>`, and elsewhere the name in
    `VLIGHTNING_JOB` if there is one, so that a job that is started again finds its folder and continues in it. An
    evaluation of a checkpoint in a run folder gets `<run folder>_<subcommand>_<n>`. `default_root_dir` is the same
    folder, since Lightning writes and reads the checkpoints of a requeue (`hpc_ckpt_<n>.ckpt`) there for any
    subcommand. On exit, a new folder is removed if it is empty, or if the run failed before its first batch.

    Yields:
        A function to call after the first batch.

    Raises:
        UserError: If the given version holds a run, and this run does not resume from it.
    """
    state = {"began": False, "failed": True}
    created = [] if config.trainer.get("fast_dev_run") else _claim(config, name, typed, saved)
    try:
        yield lambda: state.update(began=True)
        state["failed"] = False
    finally:
        for variable in (RUN_DIR_VARIABLE, CHECKPOINT_VARIABLE):
            os.environ.pop(variable, None)
        if created:
            written = {path.name for path in created[0].rglob("*") if not path.is_dir()} - {NOTE, ID_FILE}
            early = all(any(fnmatch.fnmatch(name, pattern) for pattern in _EARLY) for name in written)
            if not written or (state["failed"] and not state["began"] and early):
                shutil.rmtree(created[0], ignore_errors=True)
                for folder in created[1:]:
                    with contextlib.suppress(OSError):  # not empty
                        folder.rmdir()


def _claim(config: Any, name: str, typed: Typed, saved: SavedRun | None) -> list[Path]:
    """Return the created folders, the run folder first; empty if another process creates them."""
    trainer = config.trainer
    in_folder = folder_arguments(trainer)
    created: list[Path] = []
    save_dir = _save_dir(typed, saved)
    parent = save_dir / name
    version = next((number for each in in_folder if (number := each.get("version")) is not None), None)
    evaluated = _evaluated_run(typed, saved)
    if evaluated is not None:
        save_dir = evaluated.parent
        parent = evaluated.parent
        name = ""
        version = None
    requested = None if version is None else parent / _version_folder(version)
    if saved is not None and typed.subcommand == "fit" and not trainer.get("logger"):
        root = trainer.get("default_root_dir")
        requested = saved.folder if root is not None and Path(root).resolve() == saved.folder.resolve() else requested
    if not _is_first_process():  # another process creates the folder, and Lightning broadcasts its name
        inherited = os.environ.get(RUN_DIR_VARIABLE) or requested
        run_dir = Path(inherited or requeued_folder(parent, typed) or parent)
    else:
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        fresh = True
        if requested is not None:
            run_dir = requested
            fresh = not requested.exists()
            checkpoint = config.get("ckpt_path")
            resumes = run_dir.resolve() in Path(checkpoint).resolve().parents if checkpoint else is_requeued(typed)
            if not fresh and any(run_dir.iterdir()) and not resumes:
                raise UserError(
                    f"Expected an empty run folder, got {str(run_dir)!r}, which holds a run: leave the version out for "
                    "a new folder, or resume with --ckpt_path from a checkpoint in this folder."
                )
        elif evaluated is not None:
            run_dir = make_numbered(parent, f"{evaluated.name}_{typed.subcommand}")
        else:
            run_dir, fresh = next_free(parent, typed)
        run_dir.mkdir(parents=True, exist_ok=True)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
        created = [run_dir, *missing] if fresh else []
        say(f"Run folder: {run_dir}")
    if is_requeued(typed):  # in each process, before any process can write
        if any(run_dir.glob("hpc_ckpt_*.ckpt")):
            config["ckpt_path"] = None  # Lightning then uses the newest of these checkpoints
        elif (newest := newest_checkpoint(run_dir / "checkpoints")) is not None and (
            # A folder's first files may be links to checkpoints before the one that the run resumed from.
            saved is None or step_of(newest) >= step_of(saved.path)
        ):
            config["ckpt_path"] = str(newest)
    number = run_dir.name.removeprefix("version_")
    for arguments in in_folder if run_dir != parent else ():
        arguments["save_dir"] = str(save_dir)
        arguments["name"] = name
        arguments["version"] = int(number) if number.isdigit() else run_dir.name
    if typed.subcommand == "fit" or trainer.get("default_root_dir") is None:
        trainer["default_root_dir"] = str(run_dir)
    if len(in_folder) < len(loggers(trainer)):  # other loggers name other folders
        for section in ("checkpoint", "last_checkpoint"):
            if config.get(section) is not None and config[section].get("dirpath") is None:
                config[section]["dirpath"] = str(run_dir / "checkpoints")
    for logger in _wandb_loggers(config):
        arguments = logger.init_args
        arguments["save_dir"] = str(run_dir)
        if _is_first_process() and arguments.get("id") is None and arguments.get("version") is None:
            id_file = run_dir / ID_FILE
            if not id_file.exists():
                id_file.write_text(uuid4().hex[:8], encoding="utf-8")
            arguments["id"] = id_file.read_text(encoding="utf-8")
    return created


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
    if not _is_first_process() and (checkpoint := os.environ.get(CHECKPOINT_VARIABLE)):
        return Path(checkpoint)
    path = Path(name)
    best = typed.subcommand != "fit"
    if name in ("last", "best"):
        runs = _runs(typed)
        path = (best_of(runs) if name == "best" else None) or runs[-1]
        best = name == "best"
    elif not path.exists():
        folder = next(parent for parent in path.parents if parent.is_dir())
        near = [str(each) for each in folder.glob("*.ckpt" if str(folder) in (".", "/") else "**/*.ckpt")]
        hint = did_you_mean(name, near) if near else f"there is no .ckpt file under {str(folder)!r}."
        raise UserError(f"Expected a checkpoint, got {name!r}, which does not exist: {hint}")
    path = resolved(path, best)
    os.environ[CHECKPOINT_VARIABLE] = str(path)
    return path


def resolve_weights(values: Any, must_exist: bool, group: str = "model") -> None:
    """Replace each run's folder among the arguments `weights` of a module and of its groups by its checkpoint.

    Args:
        values: arguments of the module or of a group.
        must_exist: whether weights that can only be a path must exist, which is checked here, before the data is read.
            A run that goes on from a checkpoint does not read them again.
        group: name of the group in messages.

    Raises:
        UserError: If a path does not exist.
    """
    for name, value in list(vars(values).items()):
        if name == "weights" and isinstance(value, str):
            path = resolved(value)
            if must_exist and _is_path(value) and not path.exists():
                raise UserError(
                    f"Expected weights as --{group}.weights, got {value!r}, which does not exist: correct the path"
                    f"{nearest_path(value)}."
                )
            values[name] = str(path) if path != Path(value).expanduser() else value
        elif isinstance(value, Namespace):
            if name == "init_args":
                # What another class than the module means by `weights` is its own matter.
                resolve_weights(value, must_exist and group == "model", group)
            else:
                resolve_weights(value, must_exist, f"{group}.{name}")


def _is_path(weights: str) -> bool:
    """Return whether weights are no name of a hub or a library: these have no suffix and at most one slash."""
    is_url = "://" in weights
    return not is_url and (
        weights.startswith((".", "/", "~")) or weights.count("/") > 1 or Path(weights).suffix in _WEIGHTS_SUFFIXES
    )


def _runs(typed: Typed) -> list[Path]:
    """Return the runs of the same name with a checkpoint, the newest last, for `--ckpt_path last` and `best`."""
    parent = _save_dir(typed, None) / _run_name(typed, None)
    is_wandb = str(typed.lookup("trainer.logger.class_path")).endswith("WandbLogger")
    version = None if is_wandb else _logger_argument(typed, "version")  # that of W&B is no folder
    runs = sorted((run for run in parent.glob("*") if last_saved(run)), key=last_saved)
    if version is not None:
        runs = [run for run in runs if run.name == _version_folder(version)]
    elif (requeued := requeued_folder(parent, typed)) is not None and last_saved(requeued):
        runs = [requeued]
    if not runs:
        folder = parent if version is None else parent / _version_folder(version)
        raise UserError(
            f"Expected a run with a checkpoint in {str(folder)!r} for --ckpt_path {typed.lookup('ckpt_path')}, got "
            "none: leave the option out for a new run, or name the checkpoint file."
        )
    return runs


def _run_name(typed: Typed, saved: SavedRun | None) -> str:
    """Return the name of the run, as `name_run` describes."""
    name: str | None = None
    is_shipped = False
    files = {str(path): path for path in typed.config_files}
    for source in typed.sources:
        path = files.get(source.origin)
        logger_name = _first_value(source.tree, "name")
        if logger_name is not None or (source.kind == "option" and source.gives("trainer.logger.name")):
            name = str(logger_name or "")  # `--trainer.logger.name=` asks for no folder of this name
        elif path is not None and (name is None or path in typed.derived):
            config = path.resolve().with_suffix("")
            folders = config.parts[::-1]
            name = "/".join(config.parts[-folders.index("configs") :]) if "configs" in folders else config.name
        elif path is not None and is_shipped and not _is_shipped(path) and set(source.tree) - {"data"}:
            name = f"{name}_{path.stem}"
        if path is not None and set(source.tree) - {"data"}:
            is_shipped = _is_shipped(path)
    if name is None:
        return "vlightning" if saved is None or saved.name is None else saved.name
    return name


def _is_shipped(path: Path) -> bool:
    return path.resolve().is_relative_to(PACKAGE_ROOT / "configs")


def _save_dir(typed: Typed, saved: SavedRun | None) -> Path:
    """Return the folder of all runs."""
    save_dir = _logger_argument(typed, "save_dir") or _logger_argument(typed, "dir")  # `dir` is W&B's other name for it
    root = typed.lookup("trainer.default_root_dir")
    if typed.lookup("trainer.logger") is False:  # the logger's arguments are those of a config file
        save_dir, root = root, save_dir
    folder_of_checkpoint = None if saved is None else saved.save_dir
    return Path(str(save_dir or root or folder_of_checkpoint or "runs"))


def _logger_argument(typed: Typed, name: str) -> Any:
    """Return the last value given for an argument of the loggers, or None."""
    values = [_first_value(source.tree, name) for source in typed.sources]
    return next((value for value in reversed(values) if value is not None), None)


def _first_value(tree: Any, name: str) -> Any:
    """Return the argument of the first logger in nested values that has it, or None."""
    logger = at(tree, "trainer.logger")
    loggers = logger if isinstance(logger, list) else [logger]
    values = [at(each, argument) for each in loggers for argument in (f"init_args.{name}", name)]
    return next((value for value in values if value is not None), None)


def _evaluated_run(typed: Typed, saved: SavedRun | None) -> Path | None:
    """Return the run folder of the checkpoint that is evaluated; None if the evaluation writes elsewhere."""
    origins = [typed.origin(f"trainer.logger.init_args.{name}") for name in ("save_dir", "name", "version")]
    if saved is None or typed.subcommand == "fit" or any(str(origin).startswith("--") for origin in origins):
        return None
    return saved.folder if (saved.folder / "config.yaml").is_file() else None


def folder_arguments(trainer: Any) -> list[Any]:
    """Return the arguments of each logger that writes to `<save_dir>/<name>/version_<n>`."""
    kinds = ("TensorBoardLogger", "CSVLogger")
    return [logger.init_args for logger in loggers(trainer) if logger.class_path.rpartition(".")[2] in kinds]


def _version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)


def _is_first_process() -> bool:
    """Return whether this process is the first of the run.

    In a job of SLURM the rank is SLURM's: `LOCAL_RANK` of the shell that submits a job reaches every process of it.
    """
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return SLURMEnvironment().global_rank() == 0
    return getattr(rank_zero_only, "rank", 0) == 0 and all(
        os.environ.get(name, "0") == "0" for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
    )


def loggers(trainer: Any) -> list[Any]:
    """Return the loggers of a parsed configuration of the Trainer, each with `class_path` and `init_args`."""
    logger = trainer.get("logger")
    candidates = logger if isinstance(logger, list) else [logger]
    return [each for each in candidates if hasattr(each, "get") and each.get("init_args") is not None]


def _wandb_loggers(config: Any) -> list[Any]:
    return [logger for logger in loggers(config.trainer) if logger.class_path.endswith("WandbLogger")]
