"""Samples per second, operations of a step and their share of a device's highest rate, and steps without processors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from ..common.gpus import gpu_of_device
from ..common.messages import warn
from ..common.private_api import DispatchMode, compiles_itself, steps_taken
from ..common.ranges import NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, CheckedArguments

_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{device}{direction}"): passes
    for kernel, device in (("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))
    for direction, passes in (("", 1), ("_backward", 2))
}
"""Operations of torch's kernels of attention, in forward passes.

torch has no formula for the kernels of a CPU, and counts the scores that the others compute again for the backward
pass: the same step would have other operations on each device.
"""


class CountFlops(DispatchMode):
    """Count the operations of matrix products, convolutions and attention inside the context, from their shapes.

    The number is that of the formulas, the same on all devices: what a kernel computes again is not counted. Unlike
    torch's `FlopCounterMode` it follows no modules, which would add hooks to each, and runs operations without a
    formula, such as a Triton kernel, as they are.

    Attributes:
        flops: number of operations.
        failed: error of a formula of torch's, which does not know all shapes; the number is then too small.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.failed: Exception | None = None

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        if torch.is_inference_mode_enabled() and packet not in flop_registry and hasattr(func, "decompose"):
            # Inference mode leaves linear layers, convolutions and products whole, for which there is no formula.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if packet is torch.ops.aten.convolution_backward:
            self.flops += convolution_backward_flops(*args, **kwargs)
        elif (passes := _ATTENTION.get(packet)) is not None:
            inputs = args[:3] if passes == 1 else args[1:4]  # after the output's gradient
            self.flops += passes * attention_flops(*inputs)
        elif (formula := flop_registry.get(packet)) is not None:
            try:
                self.flops += formula(*args, **kwargs, out_val=result)
            except Exception as error:  # must not end a training
                self.failed = error
        return result


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the operations of the forward pass of attention: queries by keys, and weights by values.

    Args:
        query: [B, H, L, D].
        key: [B, H or fewer, N, D].
        value: [B, H or fewer, N, V].
    """
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * scores * (query.shape[-1] + value.shape[-1])


def convolution_backward_flops(gradient: Tensor, image: Tensor, weight: Tensor, *options: Any) -> int:
    """Return the operations of the backward pass of a convolution with any number of groups.

    The formula of torch 2.14 takes the weight's gradient for that of a convolution without groups.

    Args:
        gradient: gradient of the output [B, D, ...].
        image: input [B, C, ...].
        weight: weight [D, C / groups, ...], or [C, D / groups, ...] of a transposed convolution.
        options: other arguments of `aten.convolution_backward`: the fifth says whether it is transposed, the last which
            gradients of image, weight and bias are computed.
    """
    transposed = options[4]
    needed = options[-1]
    ends = image if transposed else gradient  # each of its values is in one product with each weight of its channel
    products = ends.numel() * weight[0].numel()
    return 2 * products * (bool(needed[0]) + bool(needed[1]))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the highest rate of a device in operations per second, by its data sheet; None if it is unknown.

    Lightning's table (`get_available_flops`) has rates with sparsity for some GPUs, and takes an L40S for an L4.

    Args:
        device: of the process.
        precision: of the Trainer, such as "bf16-mixed".
    """
    gpu = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return gpu and gpu.rate(precision, tf32=torch.get_float32_matmul_precision() != "highest")


class Speed:
    """Samples per second between two readings, without the time of pauses.

    A host is ahead of its GPU by some steps. The speed is that of the device if each reading is followed by reading a
    value from the device, as loggers do.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the clock and the count again."""
        self._samples = 0
        self._since = monotonic()
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
        samples = self._samples
        seconds = monotonic() - self._since
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
    return next((count for entry in batch if (count := _samples(entry))), 0)


def is_compiled(module: LightningModule) -> bool:
    """Return whether `torch.compile` compiles a module or a submodule of it."""
    if "training_step" in vars(module):  # Lightning puts the compiled method of `torch.compile(module)` there
        return True
    return any(compiles_itself(submodule) or hasattr(submodule, "_orig_mod") for submodule in module.modules())


class SpeedMonitor(CheckedArguments, Callback):
    """Log `train/samples_per_second` and `train/mfu` with every logged step; validations do not count.

    Samples are those of all processes. The MFU (model FLOPs utilisation) is the share, from 0 to 1, of the device's
    highest rate: the operations of the run's first batch, forward and backward, counted once from the shapes of matrix
    products, convolutions and attention, frozen networks and recomputation included; times the batches per second. It
    is logged where the rate of the device is known, unless `torch.compile` compiles networks, which hides operations,
    or torch cannot count an operation.

    Args:
        peak_flops: Highest rate of the device in operations per second; by default that of the GPU's data sheet in the
            Trainer's precision, where this package has it.

    Raises:
        UserError: If the rate is not positive.
    """

    def __init__(self, peak_flops: Annotated[float | None, POSITIVE] = None) -> None:
        self.peak_flops = peak_flops
        self._speed = Speed()
        self._peak: float | None = None
        self._counting: CountFlops | None = None
        self._flops_per_sample: float | None = None  # of this process, by a sample of all processes

    def mfu(self, samples_per_second: float) -> float | None:
        """Return the MFU at a number of samples per second of all processes; None if it is unknown."""
        if self._peak is None or not self._flops_per_sample:
            return None
        return self._flops_per_sample * samples_per_second / self._peak

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = self._flops_per_sample = None
        if trainer.is_global_zero and not is_compiled(pl_module):
            self._peak = self.peak_flops or peak_flops(trainer.strategy.root_device, str(trainer.precision))
        self._speed.restart()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._peak is not None and self._flops_per_sample is None:
            self._counting = CountFlops()
            self._counting.__enter__()

    def _stop_counting(self) -> int:
        counting = self._counting
        self._counting = None
        if counting is None:
            return 0
        counting.__exit__(None, None, None)
        return 0 if counting.failed else counting.flops

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        flops = self._stop_counting()
        samples = samples_of_all(trainer, batch)
        if self._flops_per_sample is None:
            self._flops_per_sample = flops / samples if samples else 0.0
        self._speed.add(samples)
        step = steps_taken(trainer)  # before this batch
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        logs = interval and (step + 1) % interval == 0
        if not (logs or trainer.should_stop) or (speed := self._speed.read()) is None:
            return
        metrics = {"train/samples_per_second": speed}
        if (mfu := self.mfu(speed)) is not None:
            metrics["train/mfu"] = mfu
        for logger in trainer.loggers:  # `log` would copy the numbers to the device, for which the host waits
            logger.log_metrics(metrics, step=step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_counting()  # a hook may have skipped the batch

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_counting()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._speed.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._speed.go_on()


class ThreadTimes(NamedTuple):
    """What the threads of this process did.

    Attributes:
        ran: seconds on a processor.
        waited: seconds in which they could have run, but had no processor.
    """

    ran: float
    waited: float


def thread_times() -> dict[str, ThreadTimes]:
    """Return the times of each thread of this process by its number, from Linux' `schedstat`; empty elsewhere."""
    times = {}
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran, waited = thread.read_text(encoding="ascii").split()[:2]
            times[thread.parent.name] = ThreadTimes(int(ran) / 1e9, int(waited) / 1e9)
    return times


class StarvedStepWarning(CheckedArguments, Callback):
    """Warn once if threads wait for processors in training steps, since other work occupies them.

    Threads that share a step wait for the slowest of them, so that a step may take many times as long where each of
    them waits a third of its time. Waits for data, a device or other processes do not count, nor do validations.
    Times are read at a logged step, on Linux only.

    Args:
        share: smallest share of waiting in the time that the threads run or wait, which is reported.
        seconds: least time between two readings, in seconds.

    Raises:
        UserError: If the share is not above 0 and at most 1, or the time is negative.
    """

    def __init__(
        self, share: Annotated[float, POSITIVE_SHARE] = 0.25, seconds: Annotated[float, NOT_NEGATIVE] = 30.0
    ) -> None:
        self.share = share
        self.seconds = seconds
        self._warned = False
        self._read()

    def _read(self) -> None:
        self._before = thread_times()
        self._since = monotonic()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        logs = interval and (steps_taken(trainer) + 1) % interval == 0
        if self._warned or not logs or monotonic() - self._since < self.seconds:
            return
        before = self._before
        self._read()
        common = before.keys() & self._before.keys()
        ran = sum(self._before[thread].ran - before[thread].ran for thread in common)
        waited = sum(self._before[thread].waited - before[thread].waited for thread in common)
        if waited and waited >= self.share * (ran + waited):
            self._warned = True
            share = waited / (ran + waited)
            warn(
                f"The threads of this process waited for a processor for {share:.0%} of their time in the last steps: "
                f"{os.getloadavg()[0]:.1f} threads want the {os.cpu_count()} processors. Threads that "
                "wait for one another make small steps many times slower: stop the other work, or start with "
                "OMP_WAIT_POLICY=passive."
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read()
