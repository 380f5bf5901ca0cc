"""A base for callbacks that act once per optimizer step that changed the weights."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from .non_finite import is_skipped


class OptimizerStepCallback(Callback):
    """Call `on_optimizer_step` at the end of each batch in which an optimizer changed the weights.

    `trainer.global_step` also advances when every gradient is None, when the fp16 gradient scaler or
    `SkipNonFiniteSteps` skips a step, and when a module's own `optimizer_step` does not step. So this callback
    registers hooks with the optimizers.
    Micro-batches that only accumulate gradients do not count. With manual optimization and several steps in one batch
    there is one call for the batch.

    The callback has no state to resume: each batch checks whether the weights changed.

    A subclass that overrides one of the hooks below calls `super()` there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights_changed = False
        self._scales_loss = False
        self._handles: list[RemovableHandle] = []

    def on_optimizer_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act after the weights have changed; called from `on_train_batch_end`."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_listening()
        self._weights_changed = False
        self._scales_loss = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._handles = [optimizer.register_step_post_hook(self._after_step) for optimizer in trainer.optimizers]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._weights_changed:
            self._weights_changed = False
            if not is_skipped(trainer):
                self.on_optimizer_step(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_listening()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A scaler that finds infinite gradients does not call the optimizer, so this hook does not run. Only an
        # optimizer that unscales by itself (fused Adam) is called; it has `found_inf` during the call.
        if self._scales_loss and bool(getattr(optimizer, "found_inf", False)):
            return
        if any(weight.grad is not None for group in optimizer.param_groups for weight in group["params"]):
            self._weights_changed = True

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
