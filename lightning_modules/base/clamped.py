"""Learned scales and temperatures that stay in their bounds."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer


class ClampedParameters(LightningModule):
    """A LightningModule some of whose parameters are put back into their bounds after each optimizer step."""

    def bounds(self) -> Iterable[tuple[nn.Parameter, float, float]]:
        """Each such parameter, with its least and its largest value."""
        raise NotImplementedError

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Any = None,
    ) -> None:
        """Step, then clamp."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            for parameter, least, largest in self.bounds():
                parameter.clamp_(least, largest)


class ClampedLogitScale(ClampedParameters):
    """A LightningModule whose `student.logit_scale`, a logarithm, stays from 0 to that of `max_logit_scale` (CLIP).

    `max_logit_scale` is a hyperparameter that the subclass saves.
    """

    def bounds(self) -> Iterable[tuple[nn.Parameter, float, float]]:
        """The one scale."""
        return [(self.get_parameter("student.logit_scale"), 0.0, math.log(self.hparams["max_logit_scale"]))]
