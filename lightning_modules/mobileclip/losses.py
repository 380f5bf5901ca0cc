"""The loss of reinforced training (section 3)."""

import torch
from torch import Tensor

from ..losses.contrast import Terms


def reinforced_loss(terms: Terms, distillation_weight: float) -> Tensor:
    """Return L_Total(B) = (1 - lambda) L_CLIP(B) + lambda L_Distill(B) of one batch of pairs.

    Args:
        terms: L_CLIP as `contrast`, and as `distillation` L_Distill, the mean over both directions and over the
            teachers of KL(teacher || student).
        distillation_weight: lambda.
    """
    parts = []
    if distillation_weight < 1:
        parts.append((1 - distillation_weight) * terms.contrast)
    if distillation_weight > 0:
        parts.append(distillation_weight * terms.distillation)
    return torch.stack(parts).sum()
