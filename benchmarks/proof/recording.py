"""Callbacks that record what a run costs and what it reaches along the way, and that measure its features."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from vlightning.callbacks import NearestNeighbourClassification
from vlightning.callbacks.speed import CountFlops
from vlightning.commands.evaluate.classification import linear_probe


class Recorder(Callback):
    """Count the FLOPs of the first step, forward and backward with teachers, and record the metrics of validations.

    Steps of a run have equal shapes, so the FLOPs of a training are those of its first step times its steps. The record
    is part of the checkpoint, so that a resumed run goes on with it, and is written to a file at the end.

    Args:
        file: file of the record, JSON.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.flops_of_step = 0
        self.curve: list[dict[str, Any]] = []
        self._cpu_seconds = 0.0  # of earlier parts of the run
        self._start = time.process_time()
        self._counting: CountFlops | None = None

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the training with its validations, without parts that no checkpoint holds."""
        return self._cpu_seconds + time.process_time() - self._start

    def state_dict(self) -> dict[str, Any]:
        """Return the record so far."""
        curve = [dict(point) for point in self.curve]
        return {"flops_of_step": self.flops_of_step, "cpu_seconds": self.cpu_seconds(), "curve": curve}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the record of a checkpoint."""
        self.flops_of_step = state_dict["flops_of_step"]
        self.curve = [dict(point) for point in state_dict["curve"]]
        self._cpu_seconds = state_dict["cpu_seconds"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start = time.process_time()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the first step."""
        if not self.flops_of_step:
            self._counting = CountFlops()
            self._counting.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the count of the first step.

        Raises:
            RuntimeError: If an operation cannot be counted.
        """
        if self._counting is not None:
            counting = self._counting
            self._counting = None
            counting.__exit__(None, None, None)
            if counting.failed is not None:
                raise RuntimeError("An operation of the step cannot be counted.") from counting.failed
            self.flops_of_step = counting.flops

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End a count that an error interrupts."""
        if self._counting is not None:
            self._counting.__exit__(None, None, None)
            self._counting = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics of a validation, with the FLOPs before it."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        step = trainer.global_step
        self.curve = [point for point in self.curve if point["step"] < step]
        self.curve.append({"step": step, "flops": step * self.flops_of_step, "metrics": values})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record."""
        record = self.state_dict() | {
            "steps": trainer.global_step,
            "steps_of_epoch": int(trainer.num_training_batches),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".part")
        unfinished.write_text(json.dumps(record))
        unfinished.replace(self.file)


class LinearProbe(NearestNeighbourClassification):
    """Classify the labeled images of another datamodule by a linear layer, and log accuracies.

    It is the logistic regression on unit features of `vlightning evaluate --protocol linear_probe`, with C = 1. Data,
    metrics and their names are as in `NearestNeighbourClassification`.
    """

    def classifier(self, train_features: Tensor, label: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
        """Return a function of unit features [B, E] to class scores [B, C]."""
        with torch.inference_mode(False):  # the Trainer tests in inference mode, whose tensors have no gradients
            weight, bias = linear_probe(train_features.clone(), label.clone(), classes)
        return lambda features: features.double() @ weight.T + bias
