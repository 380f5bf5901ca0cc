"""Cross-entropy with soft targets, such as the probabilities of a teacher."""

from torch import Tensor


def soft_cross_entropy(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy of each row with soft targets: [R].

    Args:
        log_probabilities: [R, M], such as `logits.log_softmax(-1)`.
        targets: [R, M], rows that sum to 1.
    """
    return -(targets * log_probabilities).sum(-1)
