"""What a run tells the user: where its checkpoints are, and the results of a validation or a test."""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from ...callbacks.modules import chance_levels
from ...common.files import replacing
from ...common.messages import say, table, warn
from ...common.named_code import defined_here
from ...common.shown import public
from .saved_run import step_of


class RunReport(Callback):
    """Warn of an evaluation of random weights; after a fit, print its checkpoints and a command that evaluates one."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of random weights, unless this is the validation of a fit."""
        subcommand = trainer.state.fn
        if subcommand is not None and subcommand != "fit" and trainer.ckpt_path is None:
            warn_of_random_weights(subcommand.value, pl_module)

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the checkpoints of a fit that has ended."""
        if stage == "fit":
            print_checkpoints(trainer, pl_module)


def print_checkpoints(trainer: Trainer, module: LightningModule) -> None:
    """Print a line each for the best and the last checkpoint of a fit, and a command that evaluates the better one."""
    folder = trainer.log_dir  # a collective operation: every process must ask for it
    if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
        return
    chosen: str | None = None
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    for callback in sorted(callbacks, key=lambda each: each.monitor is None):  # the best first
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
    data: Any = getattr(trainer, "datamodule", None)
    verb = "validate" if data is not None and getattr(data, "hparams", {}).get("test", "") is None else "test"
    if chosen is None or not is_overridden("test_step" if verb == "test" else "validation_step", module):
        return
    words = ["vlightning", verb, "--ckpt_path", os.path.abspath(chosen)]
    if not defined_here(type(module)) or not (data is None or defined_here(type(data))):
        words += ["--config", os.path.abspath(Path(str(folder)) / "config.yaml")]
    say(f"Next: {shlex.join(words)}")


def warn_of_random_weights(subcommand: str, module: LightningModule) -> None:
    """Warn of an evaluation, without a checkpoint, of a module that has the random weights of its constructor.

    Modules that are not trained (they have no `training_step`) load their own weights, and a method's
    `evaluates_initial_weights` returns whether it evaluates the weights that its arguments name.
    """
    initial = getattr(module, "evaluates_initial_weights", lambda: False)
    if is_overridden("training_step", module) and not initial():
        warn(
            f"{subcommand} was given no checkpoint, so {type(module).__name__} has the random weights that it was "
            "built with, and the results mean nothing: give --ckpt_path the checkpoint of a training, as in "
            "runs/<name>/version_<n>/checkpoints/last.ckpt."
        )


_PREFIXES = {"validate": "val", "test": "test"}


def report_results(
    trainer: Trainer, module: LightningModule, stage: str, results: Iterable[Mapping[str, float]], verbose: bool
) -> None:
    """Print the results of an evaluation with their chance levels and counts, and write them to `metrics.json`.

    The module's `evaluation.summary` states chance levels and counts, if it has them; callbacks that evaluate state
    chance levels as `chance`. Every process calls this.
    """
    folder = trainer.log_dir  # a collective operation
    if not trainer.is_global_zero:
        return
    values = {name: value for result in results for name, value in result.items()}
    summary: Any = getattr(getattr(module, "evaluation", None), "summary", None)
    counts = dict(getattr(summary, "counts", {}))
    chance = {f"{_PREFIXES[stage]}/{name}": level for name, level in chance_levels(trainer, module).items()}
    chance = {name: level for name, level in chance.items() if name in values}
    if verbose:
        evaluated = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        sys.stdout.write(table(values, chance) + (f"Evaluated: {evaluated}\n" if evaluated else ""))
    if folder is None or not trainer.loggers:
        return
    checkpoint = trainer.ckpt_path
    content = {
        "stage": stage,
        "checkpoint": None if checkpoint is None else public(str(checkpoint)),
        "step": None if checkpoint is None else step_of(Path(checkpoint)),
        **counts,
        # JSON cannot name values that are not finite.
        "metrics": {name: value if math.isfinite(value) else None for name, value in values.items()},
        "chance": chance,
    }
    with replacing(Path(folder) / "metrics.json") as unfinished:
        unfinished.write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
