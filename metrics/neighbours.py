"""Classification by nearest neighbours on frozen features."""

import torch
from torch import Tensor

from .finite import highest


def nearest_neighbours(
    features: Tensor, train_features: Tensor, train_label: Tensor, classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Return votes [N, C] of the k nearest training samples, each weighted by exp(cosine / temperature).

    Defaults are those of DINO (Caron et al., 2021) and its code. A vote is relative to that of the nearest neighbour,
    which changes no order of the classes and never overflows. A training sample with a non-finite feature has no vote;
    the votes for a sample with one are NaN.

    Args:
        features: Unit-length features [N, E].
        train_features: Unit-length features [M, E].
        train_label: long [M].
        classes: Number of classes C.
        k: Number of neighbours; fewer if there are fewer samples.
        temperature: Temperature of the weights.
    """
    votes = [features.new_zeros(0, classes)]
    for rows in features.split(1024):
        near = highest(rows @ train_features.T, k)
        weight = ((near.values - near.values[:, :1]) / temperature).exp()
        votes.append(rows.new_zeros(len(rows), classes).scatter_add_(1, train_label[near.indices], weight))
    return torch.cat(votes)
