"""Labelled images: rows, samples and batches of image classification."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from ..sources.records import whole_number
from ..sources.table import ImageTable
from .decode import BadSample, Fault
from .samples import Collated, Outcome, Rows, SeededSet, Transform, account, stacked
from .sampling import sample_words, seeded, view_seed

Label = int | str


class LabelledRows(Rows, Protocol):
    """Rows of images with a class each."""

    def label(self, row: int) -> int | None:
        """Number of the class, None where the split has no labels; raises :class:`BadSample`."""


class LabelTable(ImageTable):
    """Labelled images of one or several memory-mapped sources, one after another."""

    _numbers: np.ndarray | None = None

    @cached_property
    def given(self) -> list[Label | None]:
        """The labels as they stand in the data: names or whole numbers, None where a row has none that can be read."""
        columns = [layout.caption for layout in self.layouts]
        if None in columns:
            return []
        labels: list[Label | None] = []
        for row in range(len(self)):
            try:
                labels.append(_one_label(self._value(row, str(columns[self._locate(row)[0]]))))
            except BadSample as bad:
                labels.append(None)
                self._unlabelled[row] = bad.fault
        return labels

    @cached_property
    def _unlabelled(self) -> dict[int, Fault]:
        """The rows whose label cannot be read, and why; filled by :attr:`given`."""
        return {}

    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes by number: those that a source lists, else the names in the data, sorted.

        None where the labels are numbers without names.

        Raises:
            ValueError: sources list different names.
        """
        listed = {layout.classes for layout in self.layouts if layout.classes}
        if len(listed) > 1:
            one, other, *_ = (layout for layout in self.layouts if layout.classes)
            raise ValueError(
                f"found different classes in {one.origin!r} and {other.origin!r}, expected the same: read them apart"
            )
        if listed:
            return listed.pop()
        names = {label for label in self.given if isinstance(label, str)}
        return tuple(sorted(names)) or None

    def number(self, classes: Sequence[str] | None, num_classes: int, split: str) -> None:
        """Turn the labels into numbers of classes.

        Args:
            classes: names of the classes by number, None where the labels are numbers already.
            num_classes: how many classes there are.
            split: name of the split, for messages.

        Raises:
            ValueError: a label is none of the classes. (A row without one is unusable.)
        """
        place = {name: number for number, name in enumerate(classes or ())}
        numbers = np.empty(len(self.given), dtype=np.int64)
        for row, label in enumerate(self.given):
            if label is None:
                numbers[row] = -1
                continue
            number = place.get(label, -1) if isinstance(label, str) else label
            if not 0 <= number < num_classes:
                raise ValueError(self._out_of_range(row, label, list(place), num_classes, split))
            numbers[row] = number
        self._numbers = numbers

    def _out_of_range(self, row: int, label: Label, names: list[str], num_classes: int, split: str) -> str:
        where = f"found the label {label!r} in {self.name(row)} ({split} split)"
        if isinstance(label, str):
            near = difflib.get_close_matches(label, names, n=1)
            hint = f", of which {near[0]!r} is the nearest" if near else ""
            return f"{where}, expected one of the {num_classes} classes{hint}: correct it, or give data.class_names"
        return (
            f"{where}, expected a number from 0 to {num_classes - 1}: correct the labels, or set data.num_classes to "
            "the number of classes"
        )

    def label(self, row: int) -> int | None:
        """Number of a row's class, None where the split has no labels; raises :class:`BadSample`."""
        if self._numbers is None or not len(self._numbers):
            return None
        if self._numbers[row] < 0:
            raise BadSample(*self._unlabelled.get(row, Fault("no label", self.name(row))))
        return int(self._numbers[row])

    def check(self, split: str) -> None:
        """Fail where the split is empty, or where no image in it can be used.

        Raises:
            ValueError: naming what was found.
        """
        self.check_rows(split, "images: check data.image_root and data.image_column", self.unusable)


def _one_label(value: Any) -> Label | None:
    """A label from a column: whole numbers in text are numbers, lists hold one label, an empty text is none."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, str):
        text = value.strip()
        number = whole_number(text)
        return (text or None) if number is None else number
    return value


class LabelledSample(NamedTuple):
    """The views of one usable image, and its class."""

    images: tuple[torch.Tensor, ...]
    label: int | None
    sample_index: int


@dataclass
class LabelReader:
    """Reads a row as several views of its image, each with draws of its own, and its class.

    Args:
        rows: the rows.
        transform: image to float [3, H, W].
        views: how many; with none the image is not even decoded.
    """

    rows: LabelledRows
    transform: Transform
    views: int

    def __call__(self, row: int, words: tuple[int, int]) -> LabelledSample:
        """Read a row with the draws of `sample_words`; raises :class:`BadSample`."""
        images = []
        image = self.rows.image(row) if self.views else None
        for view in range(self.views):
            with seeded(view_seed(words[0], view)):
                images.append(self.transform(_copied(image)))
        return LabelledSample(tuple(images), self.rows.label(row), row)


def _copied(image: Image.Image | None) -> Image.Image:
    # A transform may work in place, and must not do so on the next view's image.
    assert image is not None
    return image.copy()


class LabelledEvaluationSet(SeededSet):
    """Images of an evaluation split; unusable ones are left out, never replaced.

    Args:
        rows: the rows.
        transform: image to float [3, H, W], without randomness.
        seed: the run's seed (a transform that does draw gets the same draws each time).
    """

    def __init__(self, rows: LabelledRows, transform: Transform, seed: int) -> None:
        self.rows = rows
        self.read = LabelReader(rows, transform, views=1)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Outcome:
        try:
            return Outcome(self.read(row, sample_words(self.seed, 0, row)), 1, [])
        except BadSample as bad:
            return Outcome(None, 1, [bad.fault])


@dataclass
class LabelCollate:
    """Batches of ``sample_index``, of ``label`` where there are labels, and of the views by name.

    Args:
        views: names of the views.
        transform: shows what a batch without any image looks like; None where a missing sample ends the run.
    """

    views: Sequence[str]
    transform: Transform | None = None

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the views."""
        samples, seen, faults = account(outcomes)
        if self.transform is None and len(samples) < len(outcomes):
            return Collated(None, seen, faults)  # no substitute found either: the loader ends the run
        batch = {name: stacked([s.images[view] for s in samples]) for view, name in enumerate(self.views) if samples}
        if self.transform is not None and not samples:
            batch = {name: self.transform(Image.new("RGB", (32, 32)))[None][:0] for name in self.views}
        if all(sample.label is not None for sample in samples):
            batch["label"] = torch.tensor([sample.label for sample in samples], dtype=torch.long)
        batch["sample_index"] = torch.tensor([sample.sample_index for sample in samples], dtype=torch.long)
        return Collated(batch, seen, faults)
