"""The smallest LightningModule with a teacher, and a quiet Trainer."""

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vlightning.callbacks import EMAPair

DIM = 4


class Student(LightningModule):
    """Trains `student` by SGD on random targets; `teacher` starts as a copy. Tests override other behavior."""

    def __init__(self, network: nn.Module | None = None, **pair: Any) -> None:
        super().__init__()
        self.student = nn.Linear(DIM, DIM) if network is None else network
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.pair = pair

    def momentum_pairs(self) -> dict[str, EMAPair]:
        return {"teacher": EMAPair("student", "teacher", **self.pair)}

    def error(self, batch: Tensor) -> Tensor:
        return (self.student(batch) - batch.flip(1)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.error(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.error(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


class Recorder(Callback):
    """Keeps a copy of the student after each batch in which `global_step` advanced."""

    def __init__(self) -> None:
        self.students: list[dict[str, Tensor]] = []
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step > self.step:
            self.students.append(copy.deepcopy(pl_module.student.state_dict()))
        self.step = trainer.global_step


class SaveSecond(Callback):
    """Saves a checkpoint after the second step, which ends an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 2 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def loader(batches: int, batch_size: int = 2, dim: int = DIM, seed: int = 0) -> DataLoader[Tensor]:
    rows = torch.randn(batches * batch_size, dim, generator=torch.Generator().manual_seed(seed))
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


def trainer(*callbacks: Callback, **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return Trainer(callbacks=list(callbacks), **(defaults | kwargs))


def slow_average(
    start: dict[str, Tensor], students: list[dict[str, Tensor]], momenta: list[float]
) -> dict[str, Tensor]:
    """The definition, one tensor at a time."""
    average = {name: tensor.clone() for name, tensor in start.items()}
    for student, momentum in zip(students, momenta, strict=True):
        for name in average:
            average[name] = momentum * average[name] + (1 - momentum) * student[name]
    return average
