"""A module and a datamodule that train in a second, for tests of the command line."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vlightning.callbacks import StopOnSignal


class TinyModel(LightningModule):
    """Regress the sum of the features; `vocab_size` is the target of the link from the data."""

    def __init__(
        self,
        dim: int = 4,
        learning_rate: float = 0.1,
        vocab_size: int = 10,
        kind: Literal["plain", "fancy"] = "plain",
        metric: str = "val/recall_mean",
        every: int = 1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.metric, self.every, self.learning_rate = metric, every, learning_rate
        self.embed = nn.Linear(3, dim)
        self.head = nn.Linear(dim, 1)

    def step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return (self.head(torch.relu(self.embed(x))).squeeze(1) - y).pow(2).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if (self.current_epoch + 1) % self.every == 0:
            self.log(self.metric, -self.step(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/recall_mean", -self.step(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.embed(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class ReportingModel(TinyModel):
    """Shows in the progress bar what the methods show, and tests as they do."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/recall_mean", 79.45963287353516, prog_bar=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for name, value in {"r10": 90.0, "r1": 79.45963287353516, "r5": 2 / 3, "median_rank": 12345.0}.items():
            self.log(f"test/text_to_image_{name}", value)


class NoVocabularyModel(TinyModel):
    """Has no `vocab_size` argument, so the link from the data must be skipped."""

    def __init__(self, size: int = 4) -> None:
        super().__init__(dim=size, metric="val/other")


class TinyData(LightningDataModule):
    """Sixteen random rows."""

    def __init__(self, batch_size: int = 8, vocab_size: int = 10, num_workers: int = 0, rows: int = 16) -> None:
        super().__init__()
        self.batch_size, self.vocab_size, self.num_workers, self.rows = batch_size, vocab_size, num_workers, rows

    def loader(self) -> DataLoader:
        x = torch.randn(self.rows, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1)), batch_size=self.batch_size, num_workers=self.num_workers)

    def state_dict(self) -> dict[str, int]:
        return {"seed": int(os.environ["PL_GLOBAL_SEED"])}

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class UserCallback(Callback):
    """A callback that a user adds."""

    def __init__(self, every: int = 1) -> None:
        self.every = every


class Sender(Callback):
    """Sends a rank's process signals at the start of the training batch that brings `global_step` to `step` + 1."""

    def __init__(self, name: str, step: int, times: int = 1, rank: int = 0) -> None:
        self.number, self.step, self.times, self.rank = signal.Signals[name], step, times, rank

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


class EvaluationSender(Callback):
    """Sends the process SIGTERM at the start of each batch of a validation, a test or a prediction."""

    def on_validation_batch_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


class DiesOnce(Callback):
    """Kills a rank's process before a step, unless an earlier start has done so and left a file."""

    def __init__(self, left: str, step: int, rank: int = 1) -> None:
        self.left, self.step, self.rank = Path(left), step, rank

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank) and not self.left.exists():
            self.left.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class WaitForSlurm(Callback):
    """Holds the first start of a SLURM job before a step until the job is asked to stop, however fast its steps are."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        first = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
        stopping = next(callback for callback in trainer.callbacks if isinstance(callback, StopOnSignal))
        while first and trainer.global_step == self.step and stopping._received is None:
            time.sleep(0.05)


class ImageModel(TinyModel):
    """Regress a constant from the images of a datamodule of this package."""

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.embed(batch["image"].mean((2, 3)))).pow(2).mean()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.step(batch)


class WorkerKiller(Callback):
    """Sends the loader worker that was started last SIGKILL in a hook that begins a batch."""

    def __init__(self, hook: str, batch: int) -> None:
        def kill(trainer: Trainer, module: LightningModule, data: Any, batch_idx: int, *_: Any) -> None:
            if batch_idx == batch:
                newest = max(multiprocessing.active_children(), key=lambda child: child._identity)
                os.kill(newest.pid, signal.SIGKILL)

        setattr(self, hook, kill)


class NeedyModel(TinyModel):
    """Has an argument without a default."""

    def __init__(self, width: int) -> None:
        super().__init__(dim=width)


class FailingModel(TinyModel):
    """Fails in the training step in a selected way."""

    def __init__(self, how: Literal["sentence", "defect"] = "sentence") -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.how == "sentence":
            raise MisconfigurationException("This cannot be trained; use another.")
        return torch.zeros(2) @ torch.zeros(3)
