"""What a method hands its validation, test and prediction to."""

from typing import Any, Literal, Protocol

Batch = dict[str, Any]
Stage = Literal["validate", "test", "predict"]
PREFIXES: dict[str, str] = {"validate": "val", "test": "test"}
"""What the names of logged values begin with, by stage."""


class Evaluation(Protocol):
    """Validation, test and prediction of a method, as a component: its attribute `evaluation`.

    `Method` calls `start` at the start of an epoch, `step` or `predict` for each batch, and `finish` at the end. What
    an evaluation needs of its module is written at each implementation.
    """

    def start(self) -> None:
        """Forget what was collected before."""

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Take a batch of a validation or a test."""

    def predict(self, module: Any, batch: Batch) -> dict[str, Any]:
        """Take a batch of a prediction, and return what writers put into files."""

    def finish(self, module: Any, stage: Stage) -> None:
        """Compute and log results over all processes; every process calls it."""
