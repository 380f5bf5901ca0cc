"""The run of Weights & Biases that belongs to a run folder."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...common.errors import UserError

# File in a run folder that holds the id of its W&B run: a requeued job goes on in it.
ID_FILE = ".wandb_id"


def check_wandb(config: Any) -> None:
    """Check that the package is there if the run logs to W&B.

    Raises:
        UserError: If it is not installed.
    """
    if _wandb_loggers(config) and find_spec("wandb") is None:
        raise UserError(
            "Expected the package wandb for trainer.logger WandbLogger, got none: pip install 'vlightning[wandb]'."
        )


def place_wandb_run(config: Any, run_dir: Path, is_first: bool) -> None:
    """Put W&B's files into the run folder, and give the logger the id of the folder's run, if none was given.

    Args:
        config: The parsed configuration of the subcommand, which is changed in place.
        run_dir: The run folder.
        is_first: Whether this is the first process, which alone logs.
    """
    for logger in _wandb_loggers(config):
        arguments = logger.init_args
        arguments["save_dir"] = str(run_dir)
        if is_first and arguments.get("id") is None and arguments.get("version") is None:
            kept = run_dir / ID_FILE
            if not kept.exists():
                kept.write_text(uuid4().hex[:8], encoding="utf-8")
            arguments["id"] = kept.read_text(encoding="utf-8")


def loggers(trainer: Any) -> list[Any]:
    """Return the loggers of a parsed configuration of the Trainer, each with `class_path` and `init_args`."""
    logger = trainer.get("logger")
    each = logger if isinstance(logger, list) else [logger]
    return [one for one in each if hasattr(one, "get") and one.get("init_args") is not None]


def _wandb_loggers(config: Any) -> list[Any]:
    return [logger for logger in loggers(config.trainer) if logger.class_path.endswith("WandbLogger")]
