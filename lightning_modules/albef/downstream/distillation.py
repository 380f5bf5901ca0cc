"""Losses of the tasks that classify, with the soft targets of a momentum teacher (section 3.3 and 5 of the paper).

Shapes: B samples, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.memory import in_slices
from ...losses.soft_targets import soft_cross_entropy


def classify(network: nn.Module, slice_rows: int | None, *inputs: Tensor) -> Tensor:
    """Return logits [B, C] of a network's inputs, of which `slice_rows` rows pass at a time; None for all at once."""

    def classify_rows(*rows: Tensor) -> tuple[Tensor]:
        return (network(*rows),)

    return in_slices(classify_rows, slice_rows, *inputs)[0]


def distilled_loss(
    student: nn.Module, teacher: nn.Module | None, slice_rows: int | None, label: Tensor, alpha: float, *inputs: Tensor
) -> Tensor:
    """Classify a batch, and compute the loss: the labels' cross-entropy, mixed with that of the teacher's classes.

    Args:
        student: the trained network.
        teacher: supplies the soft targets; None without distillation.
        slice_rows: rows that pass through the networks at a time; None for all at once.
        label: long [B].
        alpha: weight of the soft targets.
        *inputs: what the networks classify, tensors [B, ...].
    """
    logits = classify(student, slice_rows, *inputs)
    if teacher is None:
        return F.cross_entropy(logits, label)
    with torch.no_grad():
        targets = classify(teacher, slice_rows, *inputs).softmax(-1)
    return distilled_cross_entropy(logits, label, targets, alpha)


def distilled_cross_entropy(logits: Tensor, label: Tensor, targets: Tensor, alpha: float) -> Tensor:
    """Compute (1 - alpha) CE(label) + alpha CE(targets), a mean over the batch.

    Args:
        logits: [B, C].
        label: long [B].
        targets: [B, C], the teacher's probabilities.
        alpha: weight of the soft targets.
    """
    soft = soft_cross_entropy(logits.log_softmax(-1), targets).mean()
    return (1 - alpha) * F.cross_entropy(logits, label) + alpha * soft
