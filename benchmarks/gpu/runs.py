"""Trainings of a few steps on batches in memory, measured by a callback."""

import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import Case
from lightning.pytorch import Callback, Trainer
from setting import Setting
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from vlightning.callbacks import CompileCallback, SkipNonFiniteSteps, StopOnSignal

WARM_UP, COUNTED = 5, 20
TOY_IMAGES = 8


class Clock(Callback):
    """Measures the steps after a warm-up: seconds and peak memory; and the flops of the first.

    Args:
        setting: of the part.
        warm_up: steps that are not counted.
        count_flops: whether to count the flops of the first step.
    """

    def __init__(self, setting: Setting, warm_up: int, count_flops: bool) -> None:
        self.setting = setting
        self.warm_up = warm_up
        self.count_flops = count_flops
        self.start = self.seconds = 0.0
        self.flops = self.peak = 0
        self._counter: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the flops of the first step, and start the clock after the warm-up."""
        if batch_idx == 0 and self.count_flops:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        if batch_idx == self.warm_up:
            self.setting.wait()
            if not self.setting.pretend:
                torch.cuda.reset_peak_memory_stats()
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the count of flops."""
        if batch_idx == 0 and self.count_flops:
            self._counter.__exit__(None, None, None)
            self.flops = self._counter.get_total_flops()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Read the clock and the peak memory."""
        self.setting.wait()
        self.seconds = (time.perf_counter() - self.start) / (trainer.global_step - self.warm_up)
        self.peak = 0 if self.setting.pretend else torch.cuda.max_memory_allocated()


def train(
    setting: Setting,
    case: Case,
    callbacks: Sequence[Callback] = (),
    images: int | None = None,
    steps: int = COUNTED,
    changes: Any = None,
    precision: Any = "bf16-mixed",
    resident: bool = True,
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
        resident: whether the batch stays on the device; otherwise it is copied from page-locked memory in each step.
    """
    warm_up, steps = (2, 2) if setting.pretend else (WARM_UP, steps)
    torch.manual_seed(0)
    # A compiler does not work under the mode that counts.
    clock = Clock(setting, warm_up, not any(isinstance(callback, CompileCallback) for callback in callbacks))
    with tempfile.TemporaryDirectory() as folder:
        module = case.build(Path(folder), setting.pretend)
        if changes is not None:
            changes(module)
        batch = case.batch(images or (TOY_IMAGES if setting.pretend else case.images), setting.pretend)
        if not setting.pretend:
            batch = {name: tensor.to("cuda") if resident else tensor.pin_memory() for name, tensor in batch.items()}
        trainer = Trainer(
            accelerator="cpu" if setting.pretend else "cuda",
            devices=1,
            precision=precision,
            max_steps=warm_up + steps,
            max_epochs=-1,
            callbacks=[clock, SkipNonFiniteSteps(), StopOnSignal(), *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        batches: Any = [batch] * (warm_up + steps)
        with contextlib.redirect_stdout(None):
            trainer.fit(module, DataLoader(batches, batch_size=None))
    return clock


def release(setting: Setting) -> None:
    """Free the memory of earlier cases."""
    torch._dynamo.reset()
    if not setting.pretend:
        torch.cuda.empty_cache()
