"""A warning about a contrastive loss that stays at the value of chance."""

from __future__ import annotations

from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..common.errors import UserError
from ..common.messages import warn
from ..common.ranges import COUNT, POSITIVE, CheckedArguments


class StuckLossWarning(CheckedArguments, Callback):
    """Warn once if a contrastive loss stays at ln B, the loss of a model that guesses among the B pairs of a batch.

    The training step returns the loss as a share of ln B, {"loss": ..., "loss_share": ...}. Its mean over `steps`
    batches is read at their end, for which the host waits for the device once; reading logged metrics would wait in
    each step.

    Args:
        name: name of the share in what the training step returns.
        steps: number of batches.
        share: smallest share that counts as chance.

    Raises:
        UserError: If `steps` is below 1; in training, if a step returns no such share.
    """

    def __init__(
        self, name: str = "loss_share", steps: Annotated[int, COUNT] = 100, share: Annotated[float, POSITIVE] = 0.98
    ) -> None:
        super().__init__()
        self.name = name
        self.steps = steps
        self.share = share
        self._sum: Tensor | float = 0.0
        self._count = 0
        self._warned = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._warned or not outputs:  # the training step returned None
            return
        share: Tensor | None = outputs.get(self.name)
        if share is None:
            raise UserError(
                f"Expected the loss as a share of ln B, {self.name!r}, beside 'loss' from training_step of "
                f"{type(pl_module).__name__}, got {sorted(outputs)}: return it, or leave StuckLossWarning out."
            )
        self._sum = self._sum + share.detach()
        self._count += 1
        if self._count < self.steps:
            return
        mean = float(self._sum) / self._count
        self._sum = 0.0
        self._count = 0
        if mean >= self.share:
            self._warned = True
            warn(
                f"The loss of the last {self.steps} batches is {mean:.2f} times ln B, that of a model that "
                "guesses the pairs of a batch. Look for captions that belong to other images or are all alike, for "
                "another tokenizer or preprocessing than the model was trained with, for random weights, or a learning "
                "rate that has destroyed them; `vlightning data` shows what the model sees."
            )
