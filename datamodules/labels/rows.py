"""Rows of labeled images."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ...common.errors import UserError
from ...common.names import nearest
from ..base.faults import ROW_ERRORS, BadSample
from ..reading.layout import is_list_type, text_to_integer
from ..reading.table import ImageTable, codes_of

Label = int | str


class LabelTable(ImageTable):
    """Labeled images of one or several memory-mapped sources, concatenated."""

    _class_indices: np.ndarray | None = None

    @cached_property
    def _labels(self) -> tuple[list[Label | None], np.ndarray]:
        """The different labels as stored, names or integers, and the index of each row's in them, int64 [N].

        None, for rows without a readable label, is the first. There are no rows if a source has no labels.
        """
        labels: list[Label | None] = [None]
        indices = []
        for source, layout in enumerate(self.layouts):
            if layout.caption is None:
                return [None], np.zeros(0, np.int64)
            column = self._columns[source][layout.caption]
            try:
                values, codes = distinct_values(column)
                codes = layout.selected(codes)
            except (*ROW_ERRORS, pa.ArrowException):  # such as text that is not UTF-8, which concerns one row only
                values = [self._label_or_none(row) for row in range(*self._starts[source : source + 2])]
                codes = np.arange(len(values))
            if layout.rows is not None:  # other rows may have other labels
                used = np.unique(codes[codes >= 0])
                values = [values[code] for code in used]
                codes = np.where(codes >= 0, np.searchsorted(used, codes), codes)
            indices.append(np.where(codes >= 0, codes + len(labels), 0))
            labels += map(_one_label, values)
        return labels, np.concatenate(indices) if indices else np.zeros(0, np.int64)

    @property
    def has_labels(self) -> bool:
        """Whether the sources have labels."""
        return len(self._labels[1]) > 0

    def raw_label(self, row: int) -> Label | None:
        """Return the label of a row as stored, a name or an integer; None for a row without a readable label."""
        labels, indices = self._labels
        return labels[indices[row]]

    def _label_or_none(self, row: int) -> Label | None:
        try:
            return self._read_label(row)
        except BadSample:
            return None

    def _read_label(self, row: int) -> Label | None:
        """Return the label of a row as stored; raises `BadSample` if it cannot be read, or there are several."""
        value = self._value(row, str(self._layout(row).caption))
        if isinstance(value, list) and len(value) > 1:
            raise BadSample("several labels", self.name(row))
        return _one_label(value)

    def _first_row(self, matches: Callable[[Label | None], bool]) -> int | None:
        """Return the first row whose label matches; None if there is none."""
        labels, indices = self._labels
        rows = np.flatnonzero(np.array([matches(label) for label in labels])[indices])
        return int(rows[0]) if len(rows) else None

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
        names = {label for label in self._labels[0] if isinstance(label, str)}
        if names:
            self._check_names(names)
        return tuple(sorted(names)) or None

    def _check_names(self, names: set[str]) -> None:
        """Check that the labels are names only, and not all of them numbers, if no source lists the names."""
        number, name = (self._first_row(lambda label, kind=kind: isinstance(label, kind)) for kind in (int, str))  # type: ignore[misc]
        if number is not None and name is not None:
            raise UserError(
                f"Expected labels that are all integers or all names, got the integer {self._shown_label(number)} and "
                f"the name {self._shown_label(name)}: write all of them in one way."
            )
        if name is not None and all(map(_is_decimal, names)):
            raise UserError(
                f"Expected integers or names as labels, got {self._shown_label(name)}: write integers from 0, or set "
                "data.class_names if these are names."
            )

    def _shown_label(self, row: int) -> str:
        return f"{self.raw_label(row)!r} in {self.name(row)}"

    def count_classes(self) -> int | None:
        """Return the number of classes that integer labels number: the largest plus one; None without such labels.

        Raises:
            UserError: If more than half of these classes have no row, as for ids that do not number the classes.
        """
        numbers = {label for label in self._labels[0] if isinstance(label, int) and label >= 0}
        if not numbers:
            return None
        largest = max(numbers)
        if largest >= 2 * len(numbers):
            row = self._first_row(lambda label: label == largest)
            raise UserError(
                f"Expected integer labels that number the classes from 0, got {len(numbers)} different ones up to "
                f"{largest}, as in {self.name(row or 0)}: correct the labels, or set data.num_classes."
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
        labels, indices = self._labels
        numbers = [index_of.get(label, num_classes) if isinstance(label, str) else label for label in labels]
        outside = np.array([number is not None and not 0 <= number < num_classes for number in numbers])
        if len(rows := np.flatnonzero(outside[indices])):
            row = int(rows[0])
            label = labels[indices[row]]
            raise UserError(self._out_of_range(row, label, list(index_of), num_classes, split))
        usable = [-1 if number is None or wrong else number for number, wrong in zip(numbers, outside, strict=True)]
        self._class_indices = np.array(usable, np.int64)[indices]

    def _out_of_range(self, row: int, label: Label | None, names: list[str], num_classes: int, split: str) -> str:
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
            self._read_label(row)  # raises the fault of the row, if it has one
            raise BadSample("no label", self.name(row))
        return int(self._class_indices[row])

    def check(self, split: str) -> None:
        """Check that the split has rows, and that at least one of the probed images can be used.

        Raises:
            UserError: If the split is empty, or no probed image can be used.
        """
        self.check_rows(split, "images", "check data.image_root and data.image_column", self.image)


def distinct_values(column: pa.ChunkedArray) -> tuple[list[Any], np.ndarray]:
    """Return the different values of a column of single values, or of lists with at most one, and each row's index.

    Returns:
        The values without None, in the order of their first rows; the indices, -1 for None or another number of values
        in a list, int64 [N].

    Raises:
        pyarrow.ArrowException: If a text is not UTF-8.
    """
    if not is_list_type(column.type):
        values, indices = codes_of(column)
        return values.to_pylist(), indices
    is_single = pc.equal(pc.list_value_length(column), 1).fill_null(False)
    values, codes = codes_of(pc.list_flatten(column.filter(is_single)))
    indices = np.full(len(column), -1)
    indices[is_single.to_numpy()] = codes
    return values.to_pylist(), indices


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
