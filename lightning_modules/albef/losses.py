"""ALBEF's losses, one function an equation of the paper. Logits and softmax are in float32 or better.

Shapes: B rows of this process, M columns of the bank (keys of the batch first, then the queue), K masked tokens,
V words of the vocabulary. A sum over rows is divided by a count that the caller gives, because the count of masked
tokens, and of pairs that have a negative, differs between processes while the gradient must not.
"""

import torch.nn.functional as F
from torch import Tensor


def contrastive_targets(teacher_logits: Tensor, positives: Tensor, alpha: float) -> Tensor:
    """Mix the teacher's pseudo-targets with the ground truth (eq. 6: y replaced by (1 - alpha) y + alpha q).

    Args:
        teacher_logits: [B, M], the momentum model's similarities over the temperature.
        positives: boolean [B, M], true where the column is a match; a row's mass is shared equally by its matches.
        alpha: weight of the pseudo-targets.

    Returns:
        [B, M], each row summing to 1.
    """
    truth = positives.to(teacher_logits.dtype)
    return alpha * teacher_logits.softmax(-1) + (1 - alpha) * truth / truth.sum(-1, keepdim=True)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with soft targets, both [B, M], averaged over the rows: a 0-D tensor."""
    return -(targets * logits.log_softmax(-1)).sum(-1).mean()


def itc_loss(image_logits: Tensor, text_logits: Tensor, image_targets: Tensor, text_targets: Tensor) -> Tensor:
    """Image-text contrastive loss (eqs. 2 and 6): the mean of both directions' cross-entropies.

    Args:
        image_logits: [B, M] from image to text.
        text_logits: [B, M] from text to image.
        image_targets: [B, M] from `contrastive_targets`.
        text_targets: [B, M] from `contrastive_targets`.
    """
    return (soft_cross_entropy(image_logits, image_targets) + soft_cross_entropy(text_logits, text_targets)) / 2


def itm_loss(logits: Tensor, labels: Tensor, weights: Tensor, count: Tensor) -> Tensor:
    """Image-text matching loss (eq. 4).

    Args:
        logits: [R, 2]; class 1 is a match.
        labels: long [R].
        weights: [R], 0 for a pair that could not be formed (an image without any admissible negative), else 1.
        count: 0-D, what the sum is divided by.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weights).sum() / count


def mlm_loss(logits: Tensor, teacher_logits: Tensor, labels: Tensor, alpha: float, count: Tensor) -> Tensor:
    """Masked language modelling with distilled soft labels (eqs. 3 and 7).

    Args:
        logits: [K, V].
        teacher_logits: [K, V] of the momentum model on the same masked text.
        labels: long [K]; -100 marks a row that carries no loss.
        alpha: weight of the pseudo-targets.
        count: 0-D, what the sum is divided by.
    """
    log_probabilities = logits.log_softmax(-1)
    hard = F.nll_loss(log_probabilities, labels, ignore_index=-100, reduction="none")
    soft = -(teacher_logits.softmax(-1) * log_probabilities).sum(-1)
    soft = soft.masked_fill(labels == -100, 0.0)
    return ((1 - alpha) * hard + alpha * soft).sum() / count
