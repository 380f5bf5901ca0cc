"""The loss of extraction (section 3.2)."""

from torch import Tensor

from ..losses.contrast import ContrastLosses


def extraction_loss(terms: ContrastLosses, distillation_weight: float) -> Tensor:
    """Return L = L_CLIP + lambda L_dist (eq. 8).

    Args:
        terms: contrast (eq. 4) and distillation of the batch.
        distillation_weight: lambda.
    """
    if not distillation_weight:
        return terms.contrast
    return terms.contrast + distillation_weight * soft_cross_entropy(terms)


def soft_cross_entropy(terms: ContrastLosses) -> Tensor:
    """Return L_dist (eqs. 5 to 7), the cross entropy of the student's softmax with the teacher's in both directions.

    It is the mean of the directions. Its gradient is that of the Kullback-Leibler divergence; its minimum is the
    teacher's entropy, not 0.
    """
    return terms.distillation + terms.entropy
