"""Results on the terminal: the metrics of an evaluation, and the last lines of `fit`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..callbacks.checkpoints.saved_run import step_of
from ..common.messages import say, warn
from ..common.named_code import defined_here


def results_table(results: Sequence[Mapping[str, float]]) -> str:
    """Return names and values in two columns, in the order of the names with numbers counted: r1, r5, r10.

    Args:
        results: The result of `Trainer.test`: a dict for each loader, with names that differ.
    """
    values = {name: value for result in results for name, value in result.items()}
    width = max(map(len, values), default=0)
    names = sorted(values, key=lambda name: [(int(n or -1), text) for n, text in re.findall(r"(\d+)|(\D+)", name)])
    return "".join(f"{name:<{width}}  {_readable(values[name]):>8}\n" for name in names)


def _readable(value: float) -> str:
    """Return four significant digits, and never fewer than those of a whole number."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def print_checkpoints(trainer: Trainer, module: LightningModule, data: Any) -> None:
    """After `fit`: print a line each for the best and the last checkpoint, and the command that evaluates the better.

    Args:
        trainer: The Trainer whose fit has ended.
        module: The module.
        data: The datamodule, or None.
    """
    folder = trainer.log_dir  # a collective operation: every process must ask for it
    if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
        return
    chosen: str | None = None
    kept = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    for callback in sorted(kept, key=lambda each: each.monitor is None):  # the best first
        path = callback.best_model_path
        if not path or not Path(path).exists():
            continue
        if callback.monitor is None:
            say(f"Last checkpoint: of step {step_of(Path(path))}, in {path}")
        elif callback.best_model_score is not None:
            score = f"{float(callback.best_model_score):.4g}"
            say(f"Best {callback.monitor}: {score} at step {step_of(Path(path))}, in {path}")
        else:
            continue
        chosen = chosen or path
    verb = "validate" if data is not None and getattr(data, "hparams", {}).get("test", "") is None else "test"
    if chosen is None or not is_overridden("test_step" if verb == "test" else "validation_step", module):
        return
    own = defined_here(type(module)) and (data is None or defined_here(type(data)))
    config = Path(str(folder)) / "config.yaml"
    say(f"Next: vlightning {verb} --ckpt_path {chosen}" + ("" if own else f" --config {config}"))


def warn_of_random_weights(subcommand: str, module: LightningModule) -> None:
    """Warn of an evaluation, without a checkpoint, of a module that has the random weights of its constructor.

    Modules that are not trained (they have no `training_step`) load their own weights, and a method's
    `evaluates_initial_weights` returns whether it evaluates the weights that its arguments name.

    Args:
        subcommand: `validate`, `test` or `predict`.
        module: The module.
    """
    initial = getattr(module, "evaluates_initial_weights", lambda: False)
    if is_overridden("training_step", module) and not initial():
        warn(
            f"{subcommand} was given no checkpoint, so {type(module).__name__} has the random weights that it was "
            "built with, and the results mean nothing: give --ckpt_path the checkpoint of a training, as in "
            "runs/<name>/version_<n>/checkpoints/last.ckpt."
        )
