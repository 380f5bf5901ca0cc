"""Interface of evaluation components, to which methods delegate validation, test and prediction."""

from typing import Any, Literal, Protocol

Batch = dict[str, Any]
Stage = Literal["validate", "test", "predict"]
PREFIXES: dict[str, str] = {"validate": "val", "test": "test"}
"""Prefix of logged names by stage."""


class Evaluation(Protocol):
    """Validation, test and prediction of a method, as a component: its attribute `evaluation`.

    `Method` calls `start` at the start of an epoch, `step` or `predict` for each batch, and `finish` at the end. Each
    implementation documents the methods that it calls on the module.
    """

    def start(self) -> None:
        """Clear the results of the last epoch."""

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Evaluate a batch of a validation or a test."""

    def predict(self, module: Any, batch: Batch) -> dict[str, Any]:
        """Predict a batch, and return the values for prediction writers."""

    def finish(self, module: Any, stage: Stage) -> None:
        """Compute and log results over all processes; every process calls this."""
