"""Zero-shot metrics of a set of labeled images, and linear probes on frozen features."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...common.errors import UserError
from ...metrics.classification import hits, zero_shot_scores
from ...metrics.finite import NOTHING, best
from ...metrics.groups import group_means, macro_f1, mean_per_class_recall
from .encoding import Encoded
from .image_sets import Prompts
from .tasks import Task

EncodeClasses = Callable[[list[str], list[str]], Tensor]
"""Class names and templates to unit-length embeddings [C, E]."""


def classification_metrics(task: Task, scores: Tensor, images: Encoded) -> dict[str, float]:
    """Return the metrics of a set, from 0 to 1.

    Args:
        task: The set.
        scores: Scores of the classes [N, C].
        images: The images of the set.

    Raises:
        UserError: If the set has no metadata, and its main metric needs groups.
    """
    right = hits(scores, images.label, 5)
    predicted = best(scores)
    metrics = {"acc1": _mean(right[:, 0])}
    if scores.shape[1] >= 5:
        metrics["acc5"] = _mean(right.any(1))
    metrics["mean_per_class_recall"] = mean_per_class_recall(predicted, images.label)
    if task.main.startswith("F1"):
        metrics[task.main] = macro_f1(predicted, images.label)
    if task.group is not None:
        counted = right.any(1) if "top5" in task.main else right[:, 0]
        by_group = group_means(counted, _groups(task, images), task.left_out)
        metrics |= {f"{task.main.partition('_w')[0]}_group_{group}": mean for group, mean in by_group.items()}
        metrics[task.main] = min(by_group.values())
    return metrics


def _groups(task: Task, images: Encoded) -> Tensor:
    assert task.group is not None
    if images.metadata.shape[1] <= task.group or images.metadata[:, task.group].isnan().any():
        raise UserError(
            f"Expected a .npy file with the group of each sample of {task.key}, got samples without: get the set again."
        )
    return images.metadata[:, task.group].long()


def attribute_metrics(images: Encoded, prompts: Prompts, encode: EncodeClasses) -> dict[str, float]:
    """Return the metrics of FairFace or UTKFace, from 0 to 1.

    Names and templates begin with their attribute, as in `race:Black` and `race:a photo of a {} person`. The columns of
    the metadata are age, gender, race and whether the race is another than white (0 or 1), which the predicted race is
    compared with, as the two sets have other races. The names of `toxic` are 14 of people, then 4 of animals, then
    crimes.

    Returns:
        DataComp's metrics: `acc_race_avg`, `acc_gender_avg` and `acc_age_avg` with their worst group `..._wg` of white
        and other; `acc_gender_x_avg` and `acc_gender_x_wg` by gender and race; `toxicity_crime_avg` and
        `toxicity_nonhuman_avg`, shares of the images with such a class, also by race; and `acc_avg`, the mean of the
        first three.

    Raises:
        UserError: If names, templates or labels are missing.
    """
    names = _by_attribute(prompts.names)
    templates = _by_attribute(prompts.templates)
    missing = [name for name in {"race", "gender", "age", *names} if name not in names or name not in templates]
    if missing or images.metadata.shape[1] < len(_LABELS) or images.metadata.isnan().any():
        raise UserError(
            f"Expected names and templates of race, gender and age, and {len(_LABELS)} labels an image, got names of "
            f"{', '.join(names)}, templates of {', '.join(templates)} and {images.metadata.shape[1]} labels: get the "
            "set again."
        )
    predicted = {name: best(zero_shot_scores(images.features, encode(names[name], templates[name]))) for name in names}
    label = {name: images.metadata[:, column].long() for column, name in enumerate(_LABELS)}
    other = label["race_binary"]
    gender = predicted["gender"] == label["gender"]
    both = label["race"] * 2 + label["gender"]
    race = ((predicted["race"] != _WHITE).long() == other) & (predicted["race"] != NOTHING)
    metrics = _by_group("acc_race", race, other)
    metrics |= _by_group("acc_gender", gender, other)
    metrics |= _by_group("acc_age", predicted["age"] == label["age"], other)
    metrics |= _by_group("acc_gender_x", gender, both)
    if (toxic := predicted.get("toxic")) is not None:
        nonhuman = (toxic >= _PEOPLE) & (toxic < _PEOPLE + _ANIMALS)
        for name, shares in (("crime", toxic >= _PEOPLE + _ANIMALS), ("nonhuman", nonhuman)):
            of_groups = _by_group(f"toxicity_{name}", shares, label["race"])
            metrics |= {key: value for key, value in of_groups.items() if not key.endswith("_wg")}
    metrics["acc_avg"] = sum(metrics[f"acc_{name}_avg"] for name in ("race", "gender", "age")) / 3
    return metrics


_LABELS = ("age", "gender", "race", "race_binary")
_WHITE = 1  # place among the names of race
_PEOPLE = 14
_ANIMALS = 4  # numbers of the names of toxic that come before the crimes


def _by_group(name: str, flags: Tensor, group: Tensor) -> dict[str, float]:
    means = group_means(flags, group)
    of_groups = {f"{name}_group_{number}": mean for number, mean in means.items()}
    return {f"{name}_avg": _mean(flags), **of_groups, f"{name}_wg": min(means.values())}


def _by_attribute(texts: list[str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for text in texts:
        attribute, _, rest = text.partition(":")
        names.setdefault(attribute, []).append(rest.strip())
    return names


def _mean(flags: Tensor) -> float:
    return float(flags.double().mean())


def few_shot(label: Tensor, shots: int | None, seed: int) -> Tensor:
    """Return the positions of the training samples, long: all, or a number of each class at random.

    Args:
        label: Labels, long [N].
        shots: Samples of each class; None for all. A class with fewer gives all it has.
        seed: Of the choice.
    """
    if shots is None:
        return torch.arange(len(label))
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(seed))
    chosen = [order[label[order] == number][:shots] for number in label.unique().tolist()]
    return torch.cat(chosen).sort().values


def linear_probe(features: Tensor, label: Tensor, classes: int, c: float = 1.0) -> tuple[Tensor, Tensor]:
    """Fit multinomial logistic regression by L-BFGS; the optimum is that of scikit-learn's LogisticRegression.

    It minimizes |W|^2 / 2 + c * (sum of the cross entropies); the bias is not penalized.

    Args:
        features: [N, E].
        label: long [N].
        classes: Number of classes C.
        c: Inverse of the penalty's weight.

    Returns:
        Weight [C, E] and bias [C], float64.
    """
    features = features.double()
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    options = {"max_iter": 1000, "tolerance_grad": 1e-7, "tolerance_change": 1e-12, "history_size": 20}
    optimizer = torch.optim.LBFGS([weight, bias], line_search_fn="strong_wolfe", **options)  # type: ignore[arg-type]

    def closure() -> Tensor:
        optimizer.zero_grad()
        data = cross_entropy(features @ weight.T + bias, label, reduction="sum")
        # Divided by the number of samples, so that the tolerances do not depend on it.
        loss = (data + weight.square().sum() / (2 * c)) / len(label)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weight.detach(), bias.detach()
