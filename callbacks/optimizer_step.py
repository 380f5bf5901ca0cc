"""A base for callbacks that act once per optimizer step that really changed the weights."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override


class OptimizerStepCallback(Callback):
    """Calls `on_optimizer_step` at the end of each batch in which an optimizer changed the weights.

    `trainer.global_step` does not tell: it also advances when every gradient is None, when the fp16 gradient scaler
    skips a step, and when a module's own `optimizer_step` decides not to step. So this callback listens to the
    optimizers themselves. Micro-batches that only accumulate gradients do not count. With manual optimization and
    several steps in one batch there is one call for the batch.

    There is no state: whether the weights changed is decided anew in each batch, so there is nothing to resume.

    A subclass that overrides one of the hooks below calls `super()` there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights_changed = False
        self._handles: list[RemovableHandle] = []

    def on_optimizer_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Acts after the weights have changed; called from `on_train_batch_end`."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_listening()
        self._weights_changed = False
        self._handles = [optimizer.register_step_post_hook(self._after_step) for optimizer in trainer.optimizers]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._weights_changed:
            self._weights_changed = False
            self.on_optimizer_step(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_listening()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A scaler that finds infinite gradients does not call the optimizer, which is then not heard here. Only an
        # optimizer that unscales by itself (fused Adam) is called all the same; for the length of the call it carries
        # `found_inf`.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        if any(weight.grad is not None for group in optimizer.param_groups for weight in group["params"]):
            self._weights_changed = True

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
