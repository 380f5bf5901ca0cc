"""The run of Weights & Biases that belongs to a run folder."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from .errors import UserError
from .typed_values import Typed

# File in a run folder that holds the id of its W&B run: a requeued job goes on in it.
ID_FILE = ".wandb_id"
_LOGGER = "trainer.logger.init_args"


def check_wandb(config: Any) -> None:
    """Check that the package is there if the run logs to W&B.

    Raises:
        UserError: If it is not installed.
    """
    if _logs_to_wandb(config) and find_spec("wandb") is None:
        raise UserError(
            "Expected the package wandb for trainer.logger WandbLogger, got none: pip install 'vlightning[wandb]'."
        )


def place_wandb_run(config: Any, typed: Typed, run_dir: Path, is_first: bool) -> None:
    """Put W&B's files and the checkpoints into the run folder, and give the logger the id of the folder's run.

    What the user typed is kept.

    Args:
        config: The parsed configuration of the subcommand, which is changed in place.
        typed: The parts of the command line.
        run_dir: The run folder.
        is_first: Whether this is the first process, which alone logs.
    """
    if not _logs_to_wandb(config):
        return
    arguments = config.trainer.logger.init_args
    if not typed.is_given(f"{_LOGGER}.save_dir"):
        arguments["save_dir"] = str(run_dir)
    for section in ("checkpoint", "last_checkpoint"):
        if config.get(section) is not None and config[section].get("dirpath") is None:
            config[section]["dirpath"] = str(run_dir / "checkpoints")
    if is_first and arguments.get("id") is None and arguments.get("version") is None:
        kept = run_dir / ID_FILE
        if not kept.exists():
            kept.write_text(uuid4().hex[:8], encoding="utf-8")
        arguments["id"] = kept.read_text(encoding="utf-8")


def _logs_to_wandb(config: Any) -> bool:
    logger = config.trainer.get("logger")
    return hasattr(logger, "get") and str(logger.get("class_path", "")).endswith("WandbLogger")
