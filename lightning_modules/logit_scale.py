"""The learned scale of a CLIP's logits."""

import math
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer


class ClampedLogitScale(LightningModule):
    """A LightningModule whose `student.logit_scale`, a logarithm, stays from 0 to that of `max_logit_scale` (CLIP).

    `max_logit_scale` is a hyperparameter that the subclass saves.
    """

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Any = None,
    ) -> None:
        """Step, then clamp the scale."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            self.get_parameter("student.logit_scale").clamp_(0, math.log(self.hparams["max_logit_scale"]))
