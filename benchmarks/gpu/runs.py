"""Trainings of a few steps on batches in memory, measured by a callback."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cases import Case
from lightning.pytorch import Callback, Trainer
from setting import Setting
from torch.utils.data import DataLoader

from vlightning.callbacks import (
    CompileCallback,
    EMACallback,
    QueueCallback,
    SkipNonFiniteSteps,
    StopOnSignal,
)
from vlightning.callbacks.speed import CountFlops

WARM_UP, COUNTED, ROUND = 5, 20, 5
TOY_IMAGES = 8
Step = Callable[[], Any]


class Clock(Callback):
    """Measures the steps after a warm-up: seconds and peak memory; and the flops of the first.

    Steps are counted in rounds of five, with rounds of the rivals' steps between them; the numbers are medians of
    rounds.

    Args:
        setting: of the part.
        warm_up: steps that are not counted.
        count_flops: whether to count the flops of the first step.
        rivals: other steps by name.
    """

    def __init__(self, setting: Setting, warm_up: int, count_flops: bool, rivals: Mapping[str, Step]) -> None:
        self.setting = setting
        self.warm_up = warm_up
        self.count_flops = count_flops
        self.rivals = rivals
        self.rounds: dict[str, list[float]] = {name: [] for name in ("own", *rivals)}
        self.start: float | None = None
        self.flops = self.peak = 0
        self.averages = Stopwatch(setting)
        self._counter: Any = None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.rounds["own"])

    @property
    def share_of_averages(self) -> float:
        """Share of the step in which moving averages are updated and queues filled."""
        return self.averages.seconds() / self.seconds

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Warm the rivals up, and measure the callbacks that every step ends with."""
        for step in self.rivals.values():
            for _ in range(self.warm_up):
                step()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            name = {EMACallback: "update", QueueCallback: "on_train_batch_end"}.get(type(callback))
            if name is not None:
                setattr(callback, name, self.averages.around(getattr(callback, name)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the flops of the first step; begin a round."""
        if batch_idx == 0 and self.count_flops:
            self._counter = CountFlops()
            self._counter.__enter__()
        if batch_idx >= self.warm_up and (batch_idx - self.warm_up) % ROUND == 0:
            self._end_round(ROUND)
            if batch_idx == self.warm_up:
                self.averages.clear()
                if not self.setting.pretend:
                    torch.cuda.reset_peak_memory_stats()
            self.setting.wait()
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the count of flops."""
        if batch_idx == 0 and self.count_flops:
            self._counter.__exit__(None, None, None)
            self.flops = self._counter.flops

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """End the last round, and read the peak memory."""
        self._end_round((trainer.global_step - self.warm_up - 1) % ROUND + 1)
        self.averages.steps = trainer.global_step - self.warm_up
        self.peak = 0 if self.setting.pretend else torch.cuda.max_memory_allocated()

    def _end_round(self, steps: int) -> None:
        if self.start is None:
            return
        self.setting.wait()
        self.rounds["own"].append((time.perf_counter() - self.start) / steps)
        for name, step in self.rivals.items():
            self.rounds[name].append(self.setting.seconds(lambda step=step: [step() for _ in range(steps)]) / steps)


class Stopwatch:
    """Time of functions on the device, without waiting for it.

    Args:
        setting: of the part.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.steps = 1
        self._found: list[tuple[Any, Any]] = []

    def clear(self) -> None:
        """Forget what was measured."""
        self._found.clear()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is measured."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = function(*args, **kwargs)
            self._found.append((start, self._now()))
            return result

        return measured

    def seconds(self) -> float:
        """Return the seconds of a step."""
        if self.setting.pretend:
            return sum(end - start for start, end in self._found) / self.steps
        return sum(start.elapsed_time(end) for start, end in self._found) / 1e3 / self.steps

    def _now(self) -> Any:
        if self.setting.pretend:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def train(
    setting: Setting,
    case: Case,
    callbacks: Sequence[Callback] = (),
    images: int | None = None,
    steps: int = COUNTED,
    changes: Any = None,
    precision: Any = "bf16-mixed",
    loader: Any = None,
    rivals: Mapping[str, Step] | None = None,
    warm_up: int = WARM_UP,
) -> Clock:
    """Train a case for some steps with the callbacks of a real run, and return the measurements.

    Args:
        setting: of the part.
        case: the method.
        callbacks: further callbacks.
        images: images of a batch; None for those of the case.
        steps: steps that are counted.
        changes: function that changes the module before training.
        precision: of the Trainer.
        loader: batches; None for one batch that stays on the device.
        rivals: other steps by name, which alternate with those of the module.
        warm_up: steps that are not counted.
    """
    warm_up, steps = (2, 2) if setting.pretend else (warm_up, steps)
    torch.manual_seed(0)
    # A compiler does not work under the mode that counts.
    clock = Clock(
        setting, warm_up, not any(isinstance(callback, CompileCallback) for callback in callbacks), rivals or {}
    )
    with tempfile.TemporaryDirectory() as folder:
        module = case.build(Path(folder), setting.pretend)
        if changes is not None:
            changes(module)
        if loader is None:
            batch = case.batch(images or (TOY_IMAGES if setting.pretend else case.images), setting.pretend)
            batches: Any = [{name: tensor.to(setting.device) for name, tensor in batch.items()}] * (warm_up + steps)
            loader = DataLoader(batches, batch_size=None)
        trainer = Trainer(
            accelerator="cpu" if setting.pretend else "cuda",
            devices=1,
            precision=precision,
            max_steps=warm_up + steps,
            max_epochs=-1,
            callbacks=[clock, SkipNonFiniteSteps(), StopOnSignal(), *callbacks],
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        with contextlib.redirect_stdout(None):
            trainer.fit(module, loader)
    return clock


def release(setting: Setting) -> None:
    """Free the memory of earlier cases."""
    torch._dynamo.reset()
    if not setting.pretend:
        torch.cuda.empty_cache()
