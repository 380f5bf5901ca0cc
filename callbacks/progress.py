"""The progress of a run as lines at intervals, for a log file; the bar of a terminal is in `progress_bar.py`."""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from time import monotonic
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from ..common.ranges import NOT_NEGATIVE, CheckedArguments
from .speed import Speed, SpeedMonitor, samples_of_all


class ProgressLines(CheckedArguments, ProgressBar):
    """Print a line after the first training batch, then at intervals, and one after the last.

    A line has what a progress bar shows: epoch, step, the metrics logged with `prog_bar=True` (the loss, and those of
    the last validation), samples per second of all processes, the MFU where a `SpeedMonitor` knows it, and the time
    left. Metrics are read from the device when a line is printed, and not otherwise. Rank 0 prints.

    Args:
        interval: Seconds between two lines.

    Raises:
        UserError: If the interval is negative.
    """

    def __init__(self, interval: Annotated[float, NOT_NEGATIVE] = 30.0) -> None:
        super().__init__()
        self.interval = interval
        self._enabled = True
        self._training = Speed()
        self._evaluation = Speed()

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            sys.stdout.write(f"{' '.join(map(str, args))}\n")
            sys.stdout.flush()  # the output is a file or a pipe, which Python writes to in blocks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training.restart()
        self._printed: tuple[float, int] | None = None  # time and step of the last line
        self._first: tuple[float, int] = (0.0, 0)  # of the first line

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._epoch = trainer.current_epoch  # one more after the last batch
        self._training.add(samples_of_all(trainer, batch))
        if self._printed is None or monotonic() - self._printed[0] >= self.interval:
            self._print_training(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._printed is not None:
            self._print_training(trainer, pl_module)

    def _print_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled:
            return
        metrics: dict[str, Any] = {**self.get_metrics(trainer, pl_module)}
        metrics.pop("v_num", None)
        step = trainer.global_step
        steps = _steps_of_run(trainer)
        now = monotonic()
        last_epoch = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs - 1}"
        line = [f"Epoch {self._epoch}{last_epoch}, step {step}{'' if steps is None else f'/{steps}'}"]
        line += [f"{name.removeprefix('train/')} {short_number(value)}" for name, value in metrics.items()]
        speed = self._training.read()
        if self._printed is None:
            self._first = now, step  # the first batch starts workers and compiles: its speed is not that of the others
        else:
            line += _speed(speed) + _mfu(trainer, speed) + _left(self._seconds_left(trainer, now, step, steps))
        self._printed = now, step
        self.print(", ".join(line))

    def _seconds_left(self, trainer: Trainer, now: float, step: int, steps: int | None) -> float | None:
        since, first = self._first
        estimates = [] if steps is None or step <= first else [(now - since) / (step - first) * (steps - step)]
        timers = [each for each in trainer.callbacks if isinstance(each, Timer)]  # type: ignore[attr-defined]
        estimates += [left for timer in timers if (left := timer.time_remaining()) is not None]
        return max(min(estimates), 0.0) if estimates else None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training.pause()
        self._start_evaluation()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training.go_on()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_evaluation()

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_evaluation()

    def _start_evaluation(self) -> None:
        self._evaluation.restart()
        self._began = self._evaluated = monotonic()
        self._batches = 0

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.sanity_checking:
            step_text = f" after step {trainer.global_step}" if trainer.state.fn == "fit" else ""
            self._evaluated_batch(trainer, f"Validation{step_text}", args[2], trainer.num_val_batches)

    @override
    def on_test_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._evaluated_batch(trainer, "Test", args[2], trainer.num_test_batches)

    @override
    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._evaluated_batch(trainer, "Prediction", args[2], trainer.num_predict_batches)

    def _evaluated_batch(self, trainer: Trainer, what: str, batch: Any, of_loaders: list[int | float]) -> None:
        self._batches += 1
        self._evaluation.add(samples_of_all(trainer, batch))
        now = monotonic()
        total = sum(of_loaders)
        if now - self._evaluated < self.interval or not self._enabled:
            return
        left = (now - self._began) / self._batches * (total - self._batches)
        of_all = f"/{total}" if math.isfinite(total) else ""
        line = [f"{what}: batch {self._batches}{of_all}", *_speed(self._evaluation.read()), *_left(left)]
        self._evaluated = now
        self.print(", ".join(line))


def _steps_of_run(trainer: Trainer) -> int | None:
    """Return the number of optimizer steps of the run; None if it is unknown."""
    try:
        steps = trainer.estimated_stepping_batches
    except MisconfigurationException:  # accumulation that depends on the epoch
        return None
    return int(steps) if math.isfinite(steps) and steps > 0 else None


def short_number(value: Any) -> str:
    """Return a metric as progress shows it: a float with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _speed(speed: float | None) -> list[str]:
    return [] if speed is None else [f"{speed:.{1 if speed < 100 else 0}f} samples/s"]


def _mfu(trainer: Trainer, speed: float | None) -> list[str]:
    monitors = [each for each in trainer.callbacks if isinstance(each, SpeedMonitor)]  # type: ignore[attr-defined]
    shares = [] if speed is None else [monitor.mfu(speed) for monitor in monitors]
    return [f"MFU {share:.1%}" for share in shares if share is not None]


def _left(seconds: float | None) -> list[str]:
    return [] if seconds is None or not math.isfinite(seconds) else [f"{timedelta(seconds=round(seconds))} left"]
