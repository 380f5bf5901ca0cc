"""Cross-entropy with soft targets, such as the probabilities of a teacher."""

import torch.nn.functional as F
from torch import Tensor

from ..core.precision import at_least_float32


def soft_cross_entropy(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy of each row with soft targets: [R].

    Args:
        log_probabilities: [R, M], such as `logits.log_softmax(-1)`.
        targets: [R, M], rows that sum to 1.
    """
    return -(targets * log_probabilities).sum(-1)


def posterior_divergence(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute T^2 KL(teacher || student) of class posteriors (Hinton et al., arXiv 1503.02531), mean over the rows.

    The teacher comes first, as in SHRe's listing 2; torch's `kl_div` takes the student's log-probabilities first.

    Args:
        target: the teacher's logits [B, C]; no gradient flows to them.
        logits: the student's logits [B, C].
        temperature: temperature T of both; T^2 preserves the scale of the gradient.
    """
    teacher = F.log_softmax(at_least_float32(target.detach()) / temperature, -1)
    student = F.log_softmax(at_least_float32(logits) / temperature, -1)
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
