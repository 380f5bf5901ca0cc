"""Rows of questions about images, memory-mapped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import UserError
from ..base.faults import BadSample, Fault
from ..base.mixing import Mix
from ..reading.layout import FAULT, Layout
from ..reading.lists import first_keys
from ..reading.open import file_stamp, no_column
from ..reading.resolve import Source, as_source, resolve
from ..reading.table import ImageTable
from .rows import SHARES, read_questions
from .samples import EMPTY_QUESTION, NO_ANSWER
from .texts import usable_answers

if TYPE_CHECKING:
    from ..base.stages import Split

_TEXTS = ("caption", "question", "question_id", "weight", "group", "share")


@dataclass
class QuestionOpening:
    """Settings of a datamodule that all of its sources share.

    Args:
        image_root: folder that relative image paths start from; None for that of the file that names them.
        image_roots: the folder by the value of a row's "dataset", in place of `image_root`.
        columns: image, question and answer column; None for "answers" if it exists, else "answer".
        weights: weight of each answer by the value of a row's "dataset".
        cache_dir: folder of the converted data; None for the default of the `datasets` library.
        max_pixels: images with more pixels are refused.
    """

    image_root: str | None
    image_roots: Mapping[str, str]
    columns: tuple[str, str, str | None]
    weights: Mapping[str, float]
    cache_dir: str | None
    max_pixels: int

    def open(self, source: str | Source) -> tuple[Any, Layout]:
        """Open a source as a `datasets.Dataset`; return it with its layout.

        Raises:
            UserError: If the source does not exist, has another form, or lacks a column.
        """
        from datasets import Dataset, Features, List, Value

        spec = as_source(source)
        kind, files, folder = resolve(spec)
        if kind not in ("json", "parquet"):
            raise UserError(
                f"Expected .json, .jsonl, .csv or .parquet files with questions, got {spec.path!r}: convert the data."
            )
        image, question, answers = self.columns
        columns = (spec.image_column or image, question, spec.caption_column or answers)
        if kind == "json" and (keys := first_keys(files[0])):
            _check_columns(columns, keys, spec.path)
        named = spec.image_root or self.image_root
        features = {
            "image": {"bytes": Value("binary"), "path": Value("string")},
            "caption": List(Value("string")),
            "image_id": Value("string"),
            "question": Value("string"),
            "question_id": Value("string"),
            "weight": Value("float64"),
            "group": Value("int64"),
            "share": Value("int64"),
            FAULT: Value("string"),
        }
        arguments = {
            "files": files,
            "columns": columns,
            "roots": {name: _absolute(path) for name, path in self.image_roots.items()},
            "weights": dict(self.weights),
            "root": (_absolute(named or folder), named is None),
            "stamp": [file_stamp(file) for file in files],
        }
        try:
            dataset = Dataset.from_generator(
                read_questions, features=Features(features), gen_kwargs=arguments, cache_dir=self.cache_dir
            )
        except Exception as error:
            cause = error.__cause__ or error.__context__
            if isinstance(cause, UserError) and "DatasetGeneration" in type(error).__name__:
                raise cause from None  # the library wraps the error of the reader
            if "corresponds to no data" in str(error):
                raise UserError(f"Expected questions in {spec.path!r}, got none: check the file.") from None
            raise
        # The paths in the records start with their root.
        return dataset, Layout(spec.path, "image", "caption", None, "", None, FAULT, weight=spec.weight)


def _absolute(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))


def _check_columns(columns: tuple[str, str, str | None], keys: list[str], path: str) -> None:
    for column, option in zip(columns, ("image_column", "question_column", "answer_column"), strict=True):
        if column is not None and column not in keys and option != "answer_column":
            raise UserError(no_column(column, keys, path, option))


class QuestionTable(ImageTable):
    """Rows of an image, a question and answers of one or several memory-mapped sources, concatenated.

    Args:
        parts: the opened sources, each with its layout.
        max_pixels: images with more pixels are refused.
        share: part of the images whose rows are kept, from and up to a share of all; None for all rows.
    """

    def __init__(
        self, parts: list[tuple[Any, Layout]], max_pixels: int, share: tuple[float, float] | None = None
    ) -> None:
        super().__init__(parts, max_pixels)
        self._texts = [dataset.select_columns(list(_TEXTS)) for dataset, _ in parts]
        self._rows: np.ndarray | None = None
        if share is not None:
            shares = self._numbers("share", 0) / SHARES
            self._rows = np.flatnonzero((shares >= share[0]) & (shares < share[1]))

    def __len__(self) -> int:
        return super().__len__() if self._rows is None else len(self._rows)

    def _locate(self, row: int) -> tuple[int, int]:
        return super()._locate(row if self._rows is None else int(self._rows[row]))

    @cached_property
    def mix(self) -> Mix:
        """Number of rows and weight of each source."""
        if self._rows is None:
            return super().mix
        counts = np.diff(np.searchsorted(self._rows, self._starts)).tolist()
        return Mix(counts, [layout.weight for layout in self.layouts])

    def _numbers(self, column: str, missing: int) -> np.ndarray:
        """Return a column of numbers of all sources, int64 [N]; unusable rows have `missing`."""
        parts = [
            dataset.with_format("arrow")[:][column].fill_null(missing).to_numpy().astype(np.int64)
            for dataset in self._texts
            if dataset is not None
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def question(self, row: int) -> str:
        """Return the raw question; raises `BadSample`."""
        return str(self._value(row, "question"))

    def answers(self, row: int) -> list[str]:
        """Return the raw answers, perhaps none; raises `BadSample`."""
        return list(self._value(row, "caption"))

    def answer_weight(self, row: int) -> float | None:
        """Return the weight of each distinct answer; None for its share of the answers."""
        weight: float | None = self._value(row, "weight")
        return weight

    def question_id(self, row: int) -> str:
        """Return the id of the question, or the index of the row."""
        return str(self._value(row, "question_id") or row)

    def images(self) -> list[list[int]]:
        """Return the rows of each image, in the order of the first rows; an embedded image is a group of its own."""
        numbers = self._numbers("group", -1)
        kept = numbers if self._rows is None else numbers[self._rows]
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(kept.tolist()):
            groups.setdefault(number if number >= 0 else -1 - row, []).append(row)
        return list(groups.values())

    def texts(self) -> Iterator[str]:
        """Yield all questions and answers of rows without a fault, to train a tokenizer on."""
        for row in range(len(self)):
            with contextlib.suppress(BadSample):
                yield self.question(row)
                yield from self.answers(row)

    def check(self, split: Split) -> None:
        """Check that the split has rows, and that at least one of the probed rows can be used.

        Raises:
            UserError: If the split is empty, or no probed row can be used.
        """

        def unusable(row: int) -> Fault | None:
            try:
                if not self.question(row).strip():
                    return Fault(EMPTY_QUESTION, self.name(row))
                if split == "train" and not usable_answers(self.answers(row)):
                    return Fault(NO_ANSWER, self.name(row))
            except BadSample as bad:
                return bad.fault
            return self.unusable(row)

        wanted = "images with questions" + (" and answers" if split == "train" else "")
        self.check_rows(split, wanted, "check data.image_root, data.image_roots and the column names", unusable)
