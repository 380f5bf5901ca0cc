"""The loss of reinforced training (MobileCLIP, section 3.1 of the brief; paper eqs. 1 to 3)."""

import torch
from torch import Tensor

from ..contrast import Terms


def reinforced_loss(terms: Terms, distillation_weight: float) -> Tensor:
    """(1 - lambda) contrast + lambda distillation of one batch; the batches' losses are summed.

    Args:
        terms: of the batch.
        distillation_weight: lambda (paper: 1 for the S models, 0.75 for B).
    """
    parts = []
    if distillation_weight < 1:
        parts.append((1 - distillation_weight) * terms.contrast)
    if distillation_weight > 0:
        parts.append(distillation_weight * terms.distillation)
    return torch.stack(parts).sum()
