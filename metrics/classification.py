"""Classification: which images are right, and accuracies in percent."""

import torch
from torch import Tensor

from .finite import highest


def hits(scores: Tensor, label: Tensor, places: int) -> Tensor:
    """Return whether the right class is at each of the first places; never if its score is non-finite.

    Args:
        scores: Scores of the classes [B, C].
        label: Right classes, long [B]; a label outside 0 to C - 1 is at no place.
        places: Number of places K, at most C.

    Returns:
        Boolean [B, K].
    """
    best = highest(scores, places)
    return (best.indices == label[:, None]) & best.values.isfinite()


def accuracies(images: Tensor, top1: Tensor, top5: Tensor, classes: int) -> dict[str, float]:
    """Return the top-1 accuracy, and the top-5 accuracy where there are more than five classes, in percent.

    Args:
        images: Number of images; a tensor of any shape is summed, such as counts by class.
        top1: Number of images whose class has the highest score.
        top5: Number of images whose class is among the five highest scores.
        classes: Number of classes.

    Returns:
        "top1", and "top5" or not.
    """
    total = int(images.sum())
    found = {"top1": 100 * int(top1.sum()) / total}
    if classes > 5:
        found["top5"] = 100 * int(top5.sum()) / total
    return found


def class_recall(images: Tensor, top1: Tensor) -> float:
    """Return the mean over the classes that occur of the share of their images that are right, in percent.

    Args:
        images: Number of images of each class, long [C].
        top1: Number of images of each class that are right, long [C].
    """
    occurs = images > 0
    return 100 * float(torch.mean(top1[occurs] / images[occurs].double()))
