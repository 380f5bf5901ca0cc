"""Samples per second, by the host's clock: the device is not waited for."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from .private_api import logged_step


class Speed:
    """Samples per second between two readings, without the time of pauses.

    A host is ahead of its GPU by some steps. The speed is that of the device if each reading is followed by reading a
    value from the device, as loggers do.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the clock and the count again."""
        self._samples, self._since = 0, monotonic()
        self._paused: float | None = None

    def add(self, samples: int) -> None:
        """Count samples."""
        self._samples += samples

    def pause(self) -> None:
        """Stop the clock."""
        self._paused = monotonic()

    def go_on(self) -> None:
        """Let the clock go on after a pause; without a pause, do nothing."""
        if self._paused is not None:
            self._since += monotonic() - self._paused
            self._paused = None

    def read(self) -> float | None:
        """Return samples per second since the last reading, and restart; None without samples."""
        samples, seconds = self._samples, monotonic() - self._since
        self.restart()
        return samples / seconds if samples and seconds > 0 else None


def samples_of_all(trainer: Trainer, batch: Any) -> int:
    """Return the number of samples in the batches of all processes, which are taken to be of equal size.

    Args:
        trainer: The Trainer.
        batch: The batch of this process; its `sample_index`, or else its first tensor, has an entry for each sample.
    """
    others: dict[str, Any] = trainer.distributed_sampler_kwargs or {}
    return _samples(batch) * int(others.get("num_replicas", 1))


def _samples(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    if isinstance(batch, Mapping):
        batch = [batch["sample_index"]] if "sample_index" in batch else list(batch.values())
    if not isinstance(batch, (list, tuple)):
        return 0
    return next((count for part in batch if (count := _samples(part))), 0)


class SpeedMonitor(Callback):
    """Log `train/samples_per_second`, of all processes together, with every logged step; validations do not count."""

    def __init__(self) -> None:
        self._speed = Speed()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._speed.restart()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._speed.add(samples_of_all(trainer, batch))
        step = logged_step(trainer)
        if step is not None and (speed := self._speed.read()) is not None:
            for logger in trainer.loggers:  # `log` would copy the number to the device, for which the host waits
                logger.log_metrics({"train/samples_per_second": speed}, step=step)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._speed.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._speed.go_on()
