"""Chance levels of the metrics of an evaluation."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer


def chance_levels(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """Return the chance levels that a module's evaluation and the callbacks state, by metric without the stage."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    summary: Any = getattr(getattr(module, "evaluation", None), "summary", None)
    stated = [*(getattr(callback, "chance", {}) for callback in callbacks), getattr(summary, "chance", {})]
    return {name: float(level) for levels in stated for name, level in levels.items()}
