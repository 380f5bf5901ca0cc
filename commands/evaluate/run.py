"""The evaluation of a model on sets, one after the other; it goes on where it was stopped."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...callbacks.distributed.collectives import rank
from ...common.errors import UserError
from ...common.messages import say
from ...datamodules.stores.shards import ShardRows
from ...metrics.classification import nearest_neighbours, zero_shot_scores
from . import row_sets
from .classification import attribute_metrics, classification_metrics, few_shot, linear_probe
from .encoding import Encoded, Loading, encode_classes, encode_images
from .image_sets import ImageSet, Prompts, read_prompts
from .kept import image_settings, kept, text_settings
from .model import ImageTextModel
from .results import ABSENT, Result, read_results, write_results
from .row_sets import find_table
from .tasks import Protocol, Task


@dataclass(frozen=True)
class Settings:
    """How sets are evaluated.

    Args:
        protocols: Classifiers; linear probes and nearest neighbours need the set's training images.
        shots: Training images of each class; None for all.
        c: Inverse weight of the linear probe's penalty.
        temperature: Temperature of their weights.
        cache: Folder of the stores of encoded classes and training images; None keeps none.
        names: Class names instead of those that a set ships.
        templates: Prompts, with `{}` where the name goes, instead of those that a set ships.
    """

    root: Path
    loading: Loading = field(default_factory=Loading)
    protocols: tuple[Protocol, ...] = ("zero_shot",)
    shots: int | None = None
    seed: int = 0
    c: float = 1.0
    k: int = 20
    temperature: float = 0.07
    cache: Path | None = None
    names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    def note(self, protocol: Protocol) -> str | None:
        """Return what tells the results of other settings apart; None for the zero-shot protocol as it is."""
        shots = "all" if self.shots is None else f"{self.shots} (seed {self.seed})"
        if protocol == "linear_probe":
            return f"C {self.c:g}, {shots} training images a class"
        if protocol == "knn":
            return f"k {self.k}, temperature {self.temperature:g}, {shots} training images a class"
        if not self.names and not self.templates:
            return None
        digest = hashlib.sha256(json.dumps([self.names, self.templates]).encode()).hexdigest()
        return f"own prompts {digest[:8]}"


def _note(model: ImageTextModel, task: Task, settings: Settings, protocol: Protocol) -> str | None:
    prompts = settings.note(protocol) if task.kind == "classification" else None
    return "; ".join(clause for clause in (model.note, prompts) if clause) or None


def evaluate(model: ImageTextModel, tasks: Sequence[Task], settings: Settings, out: Path) -> list[Result]:
    """Evaluate a model, and write the results after each set; sets with a result in the file are not repeated.

    Returns:
        The results, those of before included, in the order of the sets. A set that is missing or damaged has no
        metrics, and a reason.

    Raises:
        UserError: If the file has results of another model.
    """
    before = read_results(out) if out.exists() else []
    if other := next((result for result in before if result.sha256 != model.sha256), None):
        raise UserError(
            f"Expected results of {model.name} in {str(out)!r}, got those of {other.model}: give another file as --out."
        )
    done = {(result.key, result.protocol): result for result in before if result.main is not None}
    for task in tasks:
        for protocol in settings.protocols:
            # A result of other settings is not that of this command.
            if (old := done.get((task.key, protocol))) and old.note != _note(model, task, settings, protocol):
                del done[task.key, protocol]
    for number, task in enumerate(tasks, start=1):
        protocols = [protocol for protocol in settings.protocols if (task.key, protocol) not in done]
        if not protocols:
            continue
        try:
            results = _results(model, task, settings, protocols)
        except UserError as error:  # the others are evaluated nevertheless
            results = [Result(task.key, name, {}, model.name, model.sha256, missing=str(error)) for name in protocols]
        for result in results:
            done[task.key, result.protocol] = result
            outcome = str(result.missing)
            if result.main is not None:
                outcome = f"{100 * result.main:.2f}{f' ({result.note})' if result.note else ''}"
            if not result.absent:  # the report lists these in one line
                say(f"{number} of {len(tasks)}: {task.key}, {result.protocol}: {outcome}")
        if rank() == 0:
            write_results(out, done.values())
    return list(done.values())


@dataclass
class _Measured:
    """Images of a test split, None if they were not read; metrics from 0 to 1, or why there are none, by protocol."""

    images: Encoded | None = None
    metrics: dict[Protocol, dict[str, float]] = field(default_factory=dict)
    missing: dict[Protocol, str] = field(default_factory=dict)


def _results(model: ImageTextModel, task: Task, settings: Settings, protocols: list[Protocol]) -> list[Result]:
    """Evaluate one set; every image of its test split is encoded once."""
    began = time.monotonic()
    measure = _image_set if task.kind in ("classification", "attributes") else _table
    measured = measure(model, task, settings, protocols)
    common: dict[str, Any] = {"model": model.name, "sha256": model.sha256}
    if (images := measured.images) is not None:
        common |= {"samples": len(images.index), "bad": images.bad, "named": tuple(images.named)}
    common["seconds"] = round(time.monotonic() - began, 1)
    complete: dict[Protocol, dict[str, float]] = {}
    for protocol, metrics in measured.metrics.items():
        if task.main not in metrics:
            raise UserError(f"Expected samples for {task.main} in {task.key}, got none: get the set again.")
        complete[protocol] = metrics | {"main_metric": metrics[task.main]}
    return [
        Result(
            task.key,
            protocol,
            complete.get(protocol, {}),
            missing=measured.missing.get(protocol),
            note=_note(model, task, settings, protocol),
            **common,
        )
        for protocol in protocols
    ]


def _image_set(model: ImageTextModel, task: Task, settings: Settings, protocols: list[Protocol]) -> _Measured:
    folder = settings.root / task.folder
    if not folder.is_dir():
        return _Measured(missing=dict.fromkeys(protocols, f"{ABSENT} {folder}"))
    prompts = _prompts(task, folder, settings)
    classes = len(prompts.names)
    images = encode_images(model, ImageSet(folder, "test", model.transform, classes), settings.loading)
    if not len(images.index):
        raise UserError(
            f"Expected images in {str(folder)!r}, got none that can be used ({images.bad}): get the set again."
        )
    measured = _Measured(images)
    trained = [protocol for protocol in protocols if protocol != "zero_shot"]
    if task.kind == "attributes":
        if "zero_shot" in protocols:
            measured.metrics["zero_shot"] = attribute_metrics(images, prompts, partial(_classes, model, settings))
        measured.missing = dict.fromkeys(trained, "several labels an image")
        return measured
    if "zero_shot" in protocols:
        scores = zero_shot_scores(images.features, _classes(model, settings, prompts.names, prompts.templates))
        measured.metrics["zero_shot"] = classification_metrics(task, scores, images)
    if trained and not (folder / "train").is_dir():
        measured.missing = dict.fromkeys(trained, f"no training images in {folder / 'train'}")
    elif trained:
        train = _training(model, task, folder, classes, settings)
        for protocol in trained:
            scores = _trained_scores(protocol, images, train, classes, settings)
            measured.metrics[protocol] = classification_metrics(task, scores, images)
    return measured


def _prompts(task: Task, folder: Path, settings: Settings) -> Prompts:
    """Return the prompts of a set, with those of the user in their place."""
    shipped = read_prompts(folder)
    if task.kind != "classification":
        return shipped
    if settings.names and len(settings.names) != len(shipped.names):
        raise UserError(
            f"Expected {len(shipped.names)} class names for {task.key}, as its labels have, got {len(settings.names)} "
            "after --classes: correct them."
        )
    return Prompts(list(settings.names) or shipped.names, list(settings.templates) or shipped.templates)


def _trained_scores(
    protocol: Protocol, images: Encoded, train: tuple[Tensor, Tensor], classes: int, settings: Settings
) -> Tensor:
    features, label = train
    finite = features.isfinite().all(1)  # others would make every weight of a probe non-finite
    features = features[finite]
    label = label[finite]
    chosen = few_shot(label, settings.shots, settings.seed)
    features = features[chosen]
    label = label[chosen]
    if protocol == "knn":
        return nearest_neighbours(images.features, features, label, classes, settings.k, settings.temperature)
    weight, bias = linear_probe(features, label, classes, settings.c)
    return images.features.double() @ weight.T + bias


def _table(model: ImageTextModel, task: Task, settings: Settings, protocols: list[Protocol]) -> _Measured:
    measured = _Measured(missing={protocol: "no labels" for protocol in protocols if protocol != "zero_shot"})
    if "zero_shot" not in protocols:
        return measured
    path = find_table(settings.root, task.folder)
    if path is None:
        measured.missing["zero_shot"] = f"{ABSENT} {settings.root / task.folder}"
        return measured
    metrics, measured.images = getattr(row_sets, task.kind)(model, path, settings.loading)
    measured.metrics["zero_shot"] = metrics
    return measured


def _classes(model: ImageTextModel, settings: Settings, names: list[str], templates: list[str]) -> Tensor:
    """Return the embeddings of classes, from their store if they were encoded before."""

    def encode() -> ShardRows:
        nothing: list[Any] = [None] * len(names)
        captions = [[name] for name in names]
        features = encode_classes(model, names, templates)
        return ShardRows(list(names), nothing, nothing, nothing, captions=captions, text_features=features)

    rows = kept(settings.cache, partial(text_settings, model, [names, templates]), encode)
    assert rows.text_features is not None
    return rows.text_features


def _training(
    model: ImageTextModel, task: Task, folder: Path, classes: int, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return the features and the labels of the training images, from their store if they were encoded before."""

    def encode() -> ShardRows:
        images = encode_images(model, ImageSet(folder, "train", model.transform, classes), settings.loading)
        index = images.index.tolist()
        nothing: list[Any] = [None] * len(index)
        names = [f"{task.key} train, row {row}" for row in index]
        no_texts: list[list[str]] = [[] for _ in index]
        features = images.features[:, None]
        return ShardRows(names, index, nothing, nothing, features, no_texts, labels=images.label.tolist())

    stamps = [[file.name, file.stat().st_size] for file in sorted((folder / "train").glob("*.tar"))]
    rows = kept(settings.cache, partial(image_settings, model, [task.key, stamps]), encode)
    assert rows.features is not None
    return rows.features[:, 0], torch.tensor(rows.labels, dtype=torch.long)
