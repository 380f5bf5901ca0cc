"""The results of a validation or a test: a table, and `metrics.json` in the run's folder."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from ...callbacks.modules import chance_levels
from ...common.files import replacing
from ...common.messages import table
from ...common.shown import public
from .run_checkpoints import step_of

_PREFIXES = {"validate": "val", "test": "test"}


def report_results(
    trainer: Trainer, module: LightningModule, stage: str, results: Iterable[Mapping[str, float]], verbose: bool
) -> None:
    """Print the results of an evaluation with their chance levels and counts, and write them to `metrics.json`.

    The module's `evaluation.summary` states chance levels and counts, if it has them; callbacks that evaluate state
    chance levels as `chance`. Every process calls this.

    Args:
        trainer: The Trainer, after the evaluation.
        module: The evaluated module.
        stage: `validate` or `test`.
        results: Metrics by name, of each loader.
        verbose: Whether the table is printed.
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
        of = ", ".join(f"{count} {what}" for what, count in counts.items())
        sys.stdout.write(table(values, chance) + (f"Evaluated: {of}\n" if of else ""))
    if folder is None or not trainer.loggers:
        return
    checkpoint = trainer.ckpt_path
    content = {
        "stage": stage,
        "checkpoint": None if checkpoint is None else public(str(checkpoint)),
        "step": None if checkpoint is None else step_of(Path(checkpoint)),
        **counts,
        "metrics": _finite(values),
        "chance": chance,
    }
    with replacing(Path(folder) / "metrics.json") as unfinished:
        unfinished.write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the values with null for those that JSON cannot name."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
