"""Classification: accuracies in percent, zero-shot classification, and nearest neighbors, from scores or features."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .finite import highest


def hits(scores: Tensor, label: Tensor, count: int) -> Tensor:
    """Return whether the right class is at each of the first positions; never if its score is non-finite.

    Args:
        scores: Scores of the classes [B, C].
        label: Right classes, long [B]; a label outside 0 to C - 1 is at no position.
        count: Number of positions K, at most C.

    Returns:
        Boolean [B, K].
    """
    best = highest(scores, count)
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
    result = {"top1": 100 * int(top1.sum()) / total}
    if classes > 5:
        result["top5"] = 100 * int(top5.sum()) / total
    return result


def class_recall(images: Tensor, top1: Tensor) -> float:
    """Return the mean over the classes that occur of the share of their images that are right, in percent.

    Args:
        images: Number of images of each class, long [C].
        top1: Number of images of each class that are right, long [C].
    """
    occurs = images > 0
    return 100 * float(torch.mean(top1[occurs] / images[occurs].double()))


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


def class_prompts(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Return every name in every template, all prompts of a class one after the other.

    Args:
        names: Class names.
        templates: Texts with one `{}`, where the name goes.
    """
    return [template.replace("{}", name) for name in names for template in templates]


def class_embeddings(prompt_features: Tensor, templates: int) -> Tensor:
    """Return unit-length embeddings [C, E]: the normalized mean of the normalized features of a class's prompts.

    Args:
        prompt_features: Features [C * templates, E] of the prompts in the order of `class_prompts`.
        templates: Number of prompts of a class.
    """
    prompts = normalize(_at_least_float32(prompt_features), dim=-1).unflatten(0, (-1, templates))
    return normalize(prompts.mean(1), dim=-1)


def zero_shot_scores(image_features: Tensor, class_embeddings: Tensor) -> Tensor:
    """Return scores [B, C] that order the classes of an image as the cosines do.

    Args:
        image_features: Features [B, E] of any length, which does not change the order.
        class_embeddings: Unit-length embeddings [C, E].
    """
    return _at_least_float32(image_features) @ class_embeddings.T


def _at_least_float32(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))
