"""Rows of labelled images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...common.errors import UserError
from ...common.names import nearest
from ..core.faults import BadSample, Fault
from .layout import text_to_integer
from .table import ImageTable

Label = int | str


class LabelTable(ImageTable):
    """Labelled images of one or several memory-mapped sources, concatenated."""

    _class_indices: np.ndarray | None = None

    @cached_property
    def raw_labels(self) -> list[Label | None]:
        """Labels as stored: names or integers, None for a row without a readable label."""
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
        """Faults of rows whose label cannot be read; filled by :attr:`raw_labels`."""
        return {}

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes by index: the names that a source lists, else the sorted names in the data.

        Returns:
            The names; None if the labels are integers without names.

        Raises:
            UserError: if the sources list different names.
        """
        listed = {layout.classes for layout in self.layouts if layout.classes}
        if len(listed) > 1:
            one, other, *_ = (layout for layout in self.layouts if layout.classes)
            raise UserError(
                f"Expected the same classes in all sources of a split, got different ones in {one.origin!r} and "
                f"{other.origin!r}: use sources with the same classes."
            )
        if listed:
            return listed.pop()
        names = {label for label in self.raw_labels if isinstance(label, str)}
        return tuple(sorted(names)) or None

    def set_class_indices(self, classes: Sequence[str] | None, num_classes: int, split: str) -> None:
        """Convert the labels to class indices.

        Args:
            classes: names of the classes by index; None if the labels are indices.
            num_classes: number of classes.
            split: name of the split, for messages.

        Raises:
            UserError: if a label is not a class. (A row without a label is a bad row.)
        """
        place = {name: number for number, name in enumerate(classes or ())}
        numbers = np.empty(len(self.raw_labels), dtype=np.int64)
        for row, label in enumerate(self.raw_labels):
            if label is None:
                numbers[row] = -1
                continue
            number = place.get(label, -1) if isinstance(label, str) else label
            if not 0 <= number < num_classes:
                raise UserError(self._out_of_range(row, label, list(place), num_classes, split))
            numbers[row] = number
        self._class_indices = numbers

    def _out_of_range(self, row: int, label: Label, names: list[str], num_classes: int, split: str) -> str:
        found = f"got {label!r} in {self.name(row)} ({split} split)"
        if isinstance(label, str):
            near = nearest(label, names, 1)
            hint = f", of which {near[0]!r} is the nearest" if near else ""
            return (
                f"Expected a label among the {num_classes} classes{hint}, {found}: correct the label, or set "
                "data.class_names."
            )
        return (
            f"Expected a label from 0 to {num_classes - 1}, {found}: correct the labels, or set data.num_classes to "
            "the number of classes."
        )

    def label(self, row: int) -> int | None:
        """Return the class index of a row, or None if the split has no labels.

        Raises:
            BadSample: if the row has no readable label.
        """
        if self._class_indices is None or not len(self._class_indices):
            return None
        if self._class_indices[row] < 0:
            raise BadSample(*self._unlabelled.get(row, Fault("no label", self.name(row))))
        return int(self._class_indices[row])

    def check(self, split: str) -> None:
        """Check that the split has rows, and that at least one of the probed images can be used.

        Raises:
            UserError: if the split is empty, or no probed image can be used.
        """
        self.check_rows(split, "images", "check data.image_root and data.image_column", self.unusable)


def _one_label(value: Any) -> Label | None:
    """Return the label in a value: the first item of a list, an integer for a string of digits, None if empty."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, str):
        text = value.strip()
        number = text_to_integer(text)
        return (text or None) if number is None else number
    return value
