"""ALBEF's losses: contrast, matching and masked language modeling, with momentum distillation (eqs. 2 to 4, 6 and 7).

Pure functions of logits and targets; `itc.py`, `itm.py` and `mlm.py` make their arguments.

Shapes: R rows, M candidates of the contrast, K masked words, W words of the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...callbacks.distributed.collectives import all_reduce_sum, world_size
from ..losses.soft_targets import soft_cross_entropy


def itc_loss(image_logits: Tensor, text_logits: Tensor, image_targets: Tensor, text_targets: Tensor) -> Tensor:
    """Compute the image-text contrastive loss (eqs. 2 and 6): the mean cross-entropy of both directions.

    Args:
        image_logits: [R, M] from image to text.
        text_logits: [R, M] from text to image.
        image_targets: [R, M] from `contrastive_targets`.
        text_targets: [R, M] from `contrastive_targets`.
    """
    image_loss = soft_cross_entropy(image_logits.log_softmax(-1), image_targets).mean()
    text_loss = soft_cross_entropy(text_logits.log_softmax(-1), text_targets).mean()
    return (image_loss + text_loss) / 2


def contrastive_targets(teacher_logits: Tensor, positives: Tensor, alpha: float | Tensor) -> Tensor:
    """Mix the teacher's soft targets with the ground truth (eq. 6: y becomes (1 - alpha) y + alpha q).

    Args:
        teacher_logits: [R, M], the teacher's similarities over the temperature.
        positives: boolean [R, M], true where the candidate is a match; matches share a row's mass equally.
        alpha: weight of the soft targets.

    Returns:
        [R, M], each row summing to 1.
    """
    truth = positives.to(teacher_logits.dtype)
    return alpha * teacher_logits.softmax(-1) + (1 - alpha) * truth / truth.sum(-1, keepdim=True)


def itm_loss(logits: Tensor, labels: Tensor, weights: Tensor, count: Tensor) -> Tensor:
    """Compute the image-text matching loss (eq. 4).

    Args:
        logits: [R, 2]; class 1 is a match.
        labels: long [R].
        weights: [R], 0 for a pair without an admissible negative, else 1.
        count: 0-D, denominator of the sum.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weights).sum() / count


def mlm_loss(
    logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, alpha: float | Tensor, count: Tensor
) -> Tensor:
    """Compute the loss of masked language modeling with distilled soft labels (eqs. 3 and 7).

    Args:
        logits: [K, W].
        teacher_logits: [K, W] of the teacher for the same masked text; None without soft labels.
        labels: long [K]; -100 marks a row without loss.
        alpha: weight of the soft labels.
        count: 0-D, denominator of the sum.
    """
    log_probabilities = logits.log_softmax(-1)
    hard = F.nll_loss(log_probabilities, labels, ignore_index=-100, reduction="none")
    if teacher_logits is None:
        return hard.sum() / count
    soft = soft_cross_entropy(log_probabilities, teacher_logits.softmax(-1))
    soft = soft.masked_fill(labels == -100, 0.0)
    return ((1 - alpha) * hard + alpha * soft).sum() / count


def mean_count(count: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of a count over the processes, at least 1 over all of them: the denominator of a loss.

    A sum of losses divided by it, with gradients averaged over the processes, gives the mean over all rows, where
    processes have different numbers of rows.

    Args:
        count: 0-D, of this process.
        dtype: floating-point type of the result.
    """
    return all_reduce_sum(count.to(dtype)).clamp(min=1) / world_size()
