"""Classification by class and by group of samples: per-class recall, F1, the worst group, overlap of sets."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .classification import class_recall


def mean_per_class_recall(predicted: Tensor, label: Tensor) -> float:
    """Return the mean over the classes that occur of the share of their samples that are right, from 0 to 1.

    Args:
        predicted: Predicted classes, long [N]; -1 for a sample without one.
        label: Right classes, long [N].
    """
    images = label.bincount()
    return class_recall(images, label[predicted == label].bincount(minlength=len(images))) / 100


def macro_f1(predicted: Tensor, label: Tensor) -> float:
    """Return the mean of the F1 scores of the classes that occur among the labels, as WILDS defines it for iWildCam.

    Args:
        predicted: Predicted classes, long [N]; -1 for a sample without one.
        label: Right classes, long [N].
    """
    classes = int(torch.cat([predicted, label]).max()) + 1
    right = label[predicted == label].bincount(minlength=classes).double()
    of_class = label.bincount(minlength=classes)
    of_prediction = predicted[predicted >= 0].bincount(minlength=classes)
    return float((2 * right / (of_class + of_prediction))[of_class > 0].mean())


def group_means(values: Tensor, group: Tensor, left_out: Iterable[int] = ()) -> dict[int, float]:
    """Return the mean of each group that has samples.

    Args:
        values: A number of each sample [N], such as whether it is right.
        group: The group of each sample, long [N].
        left_out: Groups without a mean.
    """
    groups = [number for number in group.unique().tolist() if number not in set(left_out)]
    return {number: float(values[group == number].double().mean()) for number in groups}


def jaccard(chosen: Tensor, right: Tensor) -> float:
    """Return the size of the intersection of two sets over that of their union.

    Args:
        chosen: Whether a candidate was chosen, boolean [C].
        right: Whether a candidate belongs to the right ones, boolean [C]; at least one does.
    """
    return int((chosen & right).sum()) / int((chosen | right).sum())
