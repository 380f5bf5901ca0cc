"""The loss of extraction (section 3.3 of the paper)."""

from torch import Tensor

from ..contrast import Terms


def extraction_loss(terms: Terms, distillation_weight: float) -> Tensor:
    """L_CLIP + lambda L_dist, where L_dist is the cross entropy of the student's rows with the teacher's.

    Args:
        terms: of the batch.
        distillation_weight: lambda (paper: 1).
    """
    if not distillation_weight:
        return terms.contrast
    return terms.contrast + distillation_weight * soft_cross_entropy(terms)


def soft_cross_entropy(terms: Terms) -> Tensor:
    """L_dist: its gradient is the divergence's, and it ends at the teacher's entropy instead of 0."""
    return terms.distillation + terms.entropy
