"""Zero-shot metrics of a set of labelled images."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..common.errors import UserError
from ..metrics.classification import hits
from ..metrics.groups import group_means, macro_f1, mean_per_class_recall
from ..metrics.zero_shot import zero_shot_scores
from .encoding import Encoded
from .image_sets import Prompts
from .tasks import Task

EncodeClasses = Callable[[list[str], list[str]], Tensor]
"""Class names and templates to unit-length embeddings [C, E]."""


def classification_metrics(task: Task, scores: Tensor, found: Encoded) -> dict[str, float]:
    """Return the metrics of a set, from 0 to 1.

    Args:
        task: The set.
        scores: Scores of the classes [N, C].
        found: The images of the set.

    Raises:
        UserError: If the set has no metadata, and its main metric needs groups.
    """
    right = hits(scores, found.label, 5)
    # An image whose class has a non-finite score has no predicted class.
    predicted = scores.nan_to_num(nan=-torch.inf, posinf=-torch.inf).argmax(1)
    metrics = {"acc1": _mean(right[:, 0])}
    if scores.shape[1] >= 5:
        metrics["acc5"] = _mean(right.any(1))
    metrics["mean_per_class_recall"] = mean_per_class_recall(predicted, found.label)
    if task.main.startswith("F1"):
        metrics[task.main] = macro_f1(predicted, found.label)
    if task.group is not None:
        counted = right.any(1) if "top5" in task.main else right[:, 0]
        by_group = group_means(counted, _groups(task, found), task.left_out)
        metrics |= {f"{task.main.partition('_w')[0]}_group_{group}": mean for group, mean in by_group.items()}
        metrics[task.main] = min(by_group.values())
    return metrics


def _groups(task: Task, found: Encoded) -> Tensor:
    assert task.group is not None
    if found.metadata.shape[1] <= task.group or found.metadata[:, task.group].isnan().any():
        raise UserError(
            f"Expected a .npy file with the group of each sample of {task.key}, got samples without: get the set again."
        )
    return found.metadata[:, task.group].long()


def attribute_metrics(found: Encoded, prompts: Prompts, encode: EncodeClasses) -> dict[str, float]:
    """Return the metrics of FairFace or UTKFace, from 0 to 1.

    Names and templates begin with their attribute, as in `race:Black` and `race:a photo of a {} person`; the columns of
    the metadata are the labels of the attributes in the order of the names, without `toxic`, which is no attribute of
    an image. Its classes, words for animals and crimes, compete with those of `race`.

    Args:
        found: The images.
        prompts: Names and templates.
        encode: Encodes classes.

    Returns:
        `acc_<attribute>` of each; `acc_<attribute>_worst_race`; `toxic`, the share of the images with such a class;
        `acc_avg`, the mean over the attributes.
    """
    names, templates = _by_attribute(prompts.names), _by_attribute(prompts.templates)
    attributes = [name for name in names if name != "toxic"]
    missing = [name for name in names if name not in templates]
    if missing or "race" not in names or found.metadata.shape[1] < len(attributes):
        raise UserError(
            f"Expected names, templates and labels of the same attributes, race among them, got names of "
            f"{', '.join(names)}, templates of {', '.join(templates)} and {found.metadata.shape[1]} labels: get the "
            "set again."
        )
    classes = {name: encode(names[name], templates[name]) for name in names}
    labels = {name: found.metadata[:, column].long() for column, name in enumerate(attributes)}
    right = {name: hits(zero_shot_scores(found.features, classes[name]), labels[name], 1)[:, 0] for name in attributes}
    metrics = {f"acc_{name}": _mean(right[name]) for name in attributes}
    for name in attributes:
        metrics[f"acc_{name}_worst_race"] = min(group_means(right[name], labels["race"]).values())
    if "toxic" in names:
        scores = zero_shot_scores(found.features, torch.cat([classes["race"], classes["toxic"]]))
        metrics["toxic"] = _mean(scores.argmax(1) >= len(names["race"]))
    metrics["acc_avg"] = sum(metrics[f"acc_{name}"] for name in attributes) / len(attributes)
    return metrics


def _by_attribute(texts: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in texts:
        attribute, _, rest = text.partition(":")
        found.setdefault(attribute, []).append(rest.strip())
    return found


def _mean(flags: Tensor) -> float:
    return float(flags.double().mean())
