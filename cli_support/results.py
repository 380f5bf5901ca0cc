"""What `vlightning fit` says in the end: the best metric, where the checkpoints are, and what to type next."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..callbacks.checkpoints.sharded_checkpoint import METADATA
from ..common.named_code import defined_here
from .report import say


def say_results(trainer: Trainer, module: LightningModule, data: Any) -> None:
    """Print a line for the best checkpoint, one for the last, and the command that evaluates the better of them.

    Args:
        trainer: Whose fit has ended.
        module: What it trained.
        data: The datamodule, or None.
    """
    folder = trainer.log_dir  # which the processes agree on: every one must ask for it
    if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
        return
    best: str | None = None
    last: str | None = None
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or not Path(callback.best_model_path or "-").exists():
            continue
        path = callback.best_model_path
        if callback.monitor is None:
            last = path
        elif callback.best_model_score is not None:
            best = path
            say(f"Best {callback.monitor}: {float(callback.best_model_score):.4g} at step {_step(path)}, in {path}")
    if last is not None:
        say(f"Last checkpoint: of step {_step(last)}, in {last}")
    chosen = best or last
    verb = "validate" if data is not None and getattr(data, "hparams", {}).get("test", "") is None else "test"
    if chosen is None or not is_overridden("test_step" if verb == "test" else "validation_step", module):
        return
    config = Path(str(folder)) / "config.yaml"
    own = defined_here(type(module)) and (data is None or defined_here(type(data)))
    say(f"Next: vlightning {verb} --ckpt_path {chosen}" + ("" if own else f" --config {config}"))


def _step(path: str) -> int:
    file = Path(path, METADATA) if Path(path).is_dir() else Path(path)
    return int(torch.load(file, map_location="cpu", weights_only=True, mmap=True)["global_step"])
