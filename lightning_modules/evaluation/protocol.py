"""Interface of evaluation components, to which methods delegate validation, test and prediction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Batch = dict[str, Any]
Stage = Literal["validate", "test", "predict"]
PREFIXES: dict[str, str] = {"validate": "val", "test": "test"}
"""Prefix of logged names by stage."""


@dataclass(frozen=True)
class Summary:
    """Counts and chance levels that are shown beside the results of an evaluation.

    Attributes:
        counts: numbers of images, texts, questions or samples of all processes.
        chance: results of random guesses, by the name of the result without the prefix of the stage.
    """

    counts: Mapping[str, int]
    chance: Mapping[str, float] = field(default_factory=dict)


class Evaluation(Protocol):
    """Validation, test and prediction of a method, as a component: its attribute `evaluation`.

    `Method` calls `start` at the start of an epoch, `step` or `predict` for each batch, and `finish` at the end. Each
    implementation documents the methods that it calls on the module. `finish` of a validation or a test sets the
    attribute `summary`, which the table after the run and `metrics.json` show.
    """

    def start(self) -> None:
        """Clear the results of the last epoch."""

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Evaluate a batch of a validation or a test."""

    def predict(self, module: Any, batch: Batch) -> dict[str, Any]:
        """Predict a batch, and return the values for prediction writers."""

    def finish(self, module: Any, stage: Stage) -> None:
        """Compute and log results over all processes; every process calls this."""
