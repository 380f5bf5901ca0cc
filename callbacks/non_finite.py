"""Training steps whose loss or gradient is non-finite: skipped, counted, and reported with their samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..common.errors import UserError
from ..common.private_api import set_found_inf, unscales_gradients
from ..common.ranges import NOT_NEGATIVE, CheckedArguments
from ..metrics.finite import some_of
from .distributed.collectives import HostCopy, all_reduce_max, gather_uneven
from .modules import accumulates, is_batch_norm
from .stopping import act_last, save_resumable

_NAMED = 64  # samples in a message


class SkipNonFiniteSteps(CheckedArguments, Callback):
    """Skip an optimizer step when the loss or a gradient of any process is non-finite.

    All processes skip the step together. Weights, optimizer moments, averages (`EMACallback`), queues
    (`QueueCallback`) and running statistics of BatchNorm stay as they were; the learning-rate schedule and
    `trainer.global_step` advance, because Lightning counts attempts. A warning names the samples of the batch, and
    `train/skipped_steps` is logged. The gradient scaler of 16-bit training finds its scale by infinite gradients:
    with it, only the loss is checked until the scale is at most 1.

    Accumulated gradients are skipped as a whole, with all their batches, whichever of them is non-finite.

    The callback costs one pass over the gradients and one all-reduce of a number that the host waits for: at the end of
    the batch if the optimizer can skip a step by itself, as torch's fused optimizers can, otherwise before the step. It
    moves itself to the end of the Trainer's callbacks, so that the others have finished the batch.

    Args:
        max_skipped: Number of steps that may be skipped; the next one ends the run, with a checkpoint of the last good
            weights.

    Raises:
        UserError: If `max_skipped` is negative; in training, when more steps were skipped.
    """

    def __init__(self, max_skipped: Annotated[int, NOT_NEGATIVE] = 10) -> None:
        super().__init__()
        self.max_skipped = max_skipped
        self.skipped_steps = 0
        self._batch_is_bad = False
        self._step_is_bad = False
        self._loss_is_bad: Tensor | None = None
        self._flag: Tensor | None = None  # of this step, on the device
        self._answer: HostCopy | None = None  # the same on its way to the host
        self._norms: list[nn.Module] = []
        self._samples: list[Tensor] = []  # of the batches of this step
        self._statistics: list[tuple[Tensor, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    @property
    def batch_is_bad(self) -> bool:
        """Whether the current or the last training batch is skipped, since a batch of its step is non-finite."""
        self._decide()
        return self._batch_is_bad

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_steps = int(state_dict["skipped_steps"])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        act_last(trainer, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._norms = [module for module in pl_module.modules() if is_batch_norm(module)]
        self._stop_listening()
        self._handles = [optimizer.register_step_post_hook(_clear_found_inf) for optimizer in trainer.optimizers]
        self._begin_step()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_listening()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_is_bad = self._step_is_bad
        if isinstance(batch, Mapping) and isinstance(batch.get("sample_index"), Tensor):
            self._samples.append(batch["sample_index"])
        if self._statistics:  # taken before the first batch of the step
            return
        # A forward pass updates these, also if its loss is non-finite.
        moved = [buffer for norm in self._norms if norm.training for buffer in norm.buffers(recurse=False)]
        self._statistics = [(buffer, buffer.clone()) for buffer in moved]

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss_is_bad = ~loss.detach().isfinite().all()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if accumulates(trainer):
            self._ask([])

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        flag = self._ask([weight.grad for weight in weights], scaler)
        if scaler is None and unscales_gradients(optimizer) and _are_plain(weights, flag.device):
            set_found_inf(optimizer, flag[0].float())
            return
        self._decide()
        if not self._step_is_bad:
            return
        if scaler is not None and unscales_gradients(optimizer):
            for weight in weights[:1]:  # such an optimizer unscales and skips by itself, and needs gradients
                weight.grad.fill_(torch.nan)
        else:
            for weight in weights:
                weight.grad = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._decide()
        if accumulates(trainer):
            return
        if self._step_is_bad:
            self.skipped_steps += 1
            self._tell(trainer)
        bad = self._step_is_bad
        self._begin_step()
        if self.skipped_steps:
            pl_module.log("train/skipped_steps", float(self.skipped_steps), on_step=True, on_epoch=False)
        if bad and self.skipped_steps > self.max_skipped:
            path = save_resumable(trainer)
            raise UserError(
                f"Expected at most max_skipped={self.max_skipped} steps with a non-finite loss or gradient, got "
                f"{self.skipped_steps}, none of which changed the weights in {path}: check the samples that were "
                "named, lower the learning rate, or clip gradients."
            )

    def _begin_step(self) -> None:
        self._step_is_bad = False
        self._flag = self._answer = None
        self._samples = []
        self._statistics = []

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _ask(self, gradients: list[Tensor], scaler: Any = None) -> Tensor:
        """Return whether this step is skipped, long [1], as all processes agree; `_decide` knows it afterwards.

        Args:
            gradients: Gradients of the whole step; none if the step is not complete.
            scaler: `GradScaler` of the loss; its factor, if it is above 1, may be what makes gradients infinite.
        """
        flags = [] if self._loss_is_bad is None else [self._loss_is_bad.flatten()]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in local:
            if gradient.numel():  # a process may have no row of a sharded weight
                by_device.setdefault(gradient.device, []).append(gradient)
        for group in by_device.values():
            extremes = _extremes(group)
            bad = ~extremes.isfinite()
            if scaler is not None:  # its factor, on the device: for `get_scale` the host would wait
                bad &= scaler.scale(torch.ones_like(extremes)) <= 1
            flags.append(bad)
        if len({flag.device for flag in flags}) > 1:
            flags = [flag.cpu() for flag in flags]
        bad = torch.stack([flag.any() for flag in flags]).any() if flags else torch.tensor(False)
        self._loss_is_bad = None
        flag = all_reduce_max(bad.long()[None])
        self._flag = flag if self._flag is None else self._flag.maximum(flag)
        self._answer = HostCopy(self._flag)
        return self._flag

    def _decide(self) -> None:
        """Wait for the answer to the last `_ask`, and undo the updates of the forward passes of a bad step."""
        if self._answer is None:
            return
        bad = bool(self._answer.value())
        self._answer = None
        if not bad:
            return
        self._batch_is_bad = self._step_is_bad = True
        for buffer, before in self._statistics:
            buffer.copy_(before)

    def _tell(self, trainer: Trainer) -> None:
        samples = gather_uneven(torch.cat(self._samples)) if self._samples else torch.zeros(0)
        named = some_of(samples, _NAMED) if len(samples) else "without sample_index"
        rank_zero_warn(
            f"Step {trainer.global_step} was skipped ({self.skipped_steps} of at most {self.max_skipped}): its loss or "
            f"a gradient is non-finite. Its samples: {named}."
        )


def _extremes(gradients: list[Tensor]) -> Tensor:
    """Return extreme values of gradients, [N]: one is non-finite if any value is, and none overflows."""
    if gradients[0].device.type == "cpu":  # the norm takes forty times as long there
        return torch.stack([end for gradient in gradients for end in torch.aminmax(gradient)])
    return get_total_norm(gradients, torch.inf)[None]


def _are_plain(weights: list[Tensor], device: torch.device) -> bool:
    """Return whether weights are on one device and not sharded, as the fused kernels need them beside a flag."""
    return not any(isinstance(weight, DTensor) or weight.device != device for weight in weights)


def _clear_found_inf(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    set_found_inf(optimizer, None)


def is_skipped(trainer: Trainer) -> bool:
    """Return whether a `SkipNonFiniteSteps` skips the current, or the last, training batch."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(callback.batch_is_bad for callback in callbacks if isinstance(callback, SkipNonFiniteSteps))
