"""Rows of labeled images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ...common.errors import UserError
from ...common.names import nearest
from ..base.faults import BadSample, Fault
from ..reading.layout import text_to_integer
from ..reading.table import ImageTable

Label = int | str


class LabelTable(ImageTable):
    """Labeled images of one or several memory-mapped sources, concatenated."""

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
                value = self._value(row, str(columns[self._locate(row)[0]]))
                if isinstance(value, list) and len(value) > 1:
                    raise BadSample("several labels", self.name(row))
                labels.append(_one_label(value))
            except BadSample as bad:
                labels.append(None)
                self._unlabeled[row] = bad.fault
        return labels

    @cached_property
    def _unlabeled(self) -> dict[int, Fault]:
        """Faults of rows whose label cannot be read; filled by `raw_labels`."""
        return {}

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes by index: the names that a source lists, else the sorted names in the data.

        Returns:
            The names; None if the labels are integers without names.

        Raises:
            UserError: If the sources list different names, or the labels in the data are integers and names, or decimal
                numbers.
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
        if names:
            self._check_names(names)
        return tuple(sorted(names)) or None

    def _check_names(self, names: set[str]) -> None:
        """Check that the labels are names only, and not all of them numbers, if no source lists the names."""
        rows = {type(label): row for row, label in reversed(list(enumerate(self.raw_labels)))}
        if int in rows:
            integer, name = (f"{self.raw_labels[rows[kind]]!r} in {self.name(rows[kind])}" for kind in (int, str))
            raise UserError(
                f"Expected labels that are all integers or all names, got the integer {integer} and the name {name}: "
                "write all of them in one way."
            )
        if all(map(_is_decimal, names)):
            raise UserError(
                f"Expected integers or names as labels, got {self.raw_labels[rows[str]]!r} in {self.name(rows[str])}: "
                "write integers from 0, or set data.class_names if these are names."
            )

    def count_classes(self) -> int | None:
        """Return the number of classes that integer labels number: the largest plus one; None without such labels.

        Raises:
            UserError: If more than half of these classes have no row, as for ids that do not number the classes.
        """
        numbers = {label for label in self.raw_labels if isinstance(label, int) and label >= 0}
        if not numbers:
            return None
        largest = max(numbers)
        if largest >= 2 * len(numbers):
            raise UserError(
                f"Expected integer labels that number the classes from 0, got {len(numbers)} different ones up to "
                f"{largest}, as in {self.name(self.raw_labels.index(largest))}: correct the labels, or set "
                "data.num_classes."
            )
        missing = sorted(set(range(largest)) - numbers)
        if missing:
            rank_zero_warn(
                f"Found no image of {len(missing)} of the {largest + 1} classes that the labels up to {largest} make, "
                f"such as {missing[0]}: number the classes from 0 without gaps, or set data.num_classes if it is meant."
            )
        return largest + 1

    def set_class_indices(self, classes: Sequence[str] | None, num_classes: int, split: str) -> None:
        """Convert the labels to class indices.

        Raises:
            UserError: If a label is not a class. (A row without a label is a bad row.)
        """
        index_of = {name: index for index, name in enumerate(classes or ())}
        numbers = np.empty(len(self.raw_labels), dtype=np.int64)
        for row, label in enumerate(self.raw_labels):
            if label is None:
                numbers[row] = -1
                continue
            number = index_of.get(label, -1) if isinstance(label, str) else label
            if not 0 <= number < num_classes:
                raise UserError(self._out_of_range(row, label, list(index_of), num_classes, split))
            numbers[row] = number
        self._class_indices = numbers

    def _out_of_range(self, row: int, label: Label, names: list[str], num_classes: int, split: str) -> str:
        actual = f"got {label!r} in {self.name(row)} ({split} split)"
        if isinstance(label, str):
            near = nearest(label, names, 1)
            hint = f", of which {near[0]!r} is the nearest" if near else ""
            return (
                f"Expected a label among the {num_classes} classes{hint}, {actual}: correct the label, or set "
                "data.class_names."
            )
        return (
            f"Expected a label from 0 to {num_classes - 1}, {actual}: correct the labels, or set data.num_classes to "
            "the number of classes."
        )

    def label(self, row: int) -> int | None:
        """Return the class index of a row, or None if the split has no labels.

        Raises:
            BadSample: If the row has no readable label.
        """
        if self._class_indices is None or not len(self._class_indices):
            return None
        if self._class_indices[row] < 0:
            raise BadSample(*self._unlabeled.get(row, Fault("no label", self.name(row))))
        return int(self._class_indices[row])

    def check(self, split: str) -> None:
        """Check that the split has rows, and that at least one of the probed images can be used.

        Raises:
            UserError: If the split is empty, or no probed image can be used.
        """
        self.check_rows(split, "images", "check data.image_root and data.image_column", self.image)


def _is_decimal(text: str) -> bool:
    """Return whether a text is a number that is no integer, as `str` writes it, or NaN or infinite."""
    return re.fullmatch(r"-?[0-9]+\.[0-9]*(e[+-]?[0-9]+)?|-?[0-9]+e[+-]?[0-9]+|nan|-?inf", text) is not None


def _one_label(value: Any) -> Label | None:
    """Return the label in a value: the item of a list, an integer for a string of digits, None if empty."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, str):
        text = value.strip()
        number = text_to_integer(text)
        return (text or None) if number is None else number
    return value
