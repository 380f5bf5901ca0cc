"""Reader of questions about images: the lists of ALBEF's authors for VQA, and tables of one's own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from ...common.errors import UserError
from ..base.faults import BadSample
from ..base.mixing import Mix
from ..base.stages import Split
from ..reading.blocks import first_keys
from ..reading.cache import cached_rows
from ..reading.layout import FAULT, RECORD, Layout, Record, captions_in, identity_in, record, record_batches
from ..reading.lists import checked_object
from ..reading.open import no_column, resolve_tables
from ..reading.parquet import read_table_items
from ..reading.remote import is_inside, stamp_of
from ..reading.resolve import Named, as_source
from ..reading.table import ImageTable, positions_of
from ..text.captions import is_text, text_id
from .samples import EMPTY_QUESTION, NO_ANSWER, usable_answers

SHARES = 1_000_000
"""Largest value, exclusive, of the column `share`, by which images are held out of training."""
_FIELDS = {
    "question": pa.string(),
    "question_id": pa.string(),
    "weight": pa.float64(),
    "group": pa.int64(),
    "share": pa.int64(),
}
QUESTION_RECORD = pa.schema([*RECORD, *_FIELDS.items()])
"""Columns of the records of questions."""


def read_questions(
    files: list[str],
    columns: tuple[str, str, str | None],
    roots: dict[str, str],
    weights: dict[str, float],
    root: tuple[str, bool],
) -> Iterator[Record]:
    """Yield the records of questions.

    Args:
        files: `.json` (a list of objects), `.jsonl`, `.csv` or `.parquet` files.
        columns: keys of the image, the question, and the answers; None for "answers" if it exists, else "answer".
        roots: folder of the images by the value of "dataset", which no path may leave.
        weights: weight of each answer by the value of "dataset".
        root: folder of all other images, and whether paths may leave it.

    Raises:
        UserError: If a file has another form.
    """
    for read in (read for file in files for read in read_table_items(file)):
        row = record(lambda read=read: _question(read(), columns, roots, weights, root))  # type: ignore[misc]
        if row[FAULT] is not None:
            row |= dict.fromkeys(_FIELDS)
        yield row


def _question(
    item: Any,
    columns: tuple[str, str, str | None],
    roots: dict[str, str],
    weights: dict[str, float],
    root: tuple[str, bool],
) -> Record:
    values = checked_object(item)
    image_column, question_column, answer_column = columns
    image = values.get(image_column)
    question = values.get(question_column)
    if image is None:
        raise BadSample("no image", "")
    if not isinstance(question, str):
        raise BadSample("no question", "")
    if not is_text(question):
        raise BadSample("lone surrogate in the question", "")
    dataset = values.get("dataset")
    data, path = _image(image)
    if path is not None:
        folder, free = (roots[dataset], False) if isinstance(dataset, str) and dataset in roots else root
        path = os.path.join(folder, path)
        if not free and not is_inside(path, folder):
            raise BadSample("outside image_root", path)
    answers = values.get(answer_column or ("answers" if "answers" in values else "answer"))
    return {
        "image": {"bytes": data, "path": path},
        "caption": captions_in(answers),
        "image_id": None,
        "question": question,
        "question_id": identity_in(values.get("question_id")),
        "weight": weights.get(dataset) if isinstance(dataset, str) else None,
        "group": text_id(path) if path is not None else None,
        # By the path as written, so that an image is held out on every machine.
        "share": text_id(question if path is None else f"{dataset}\0{image}") % SHARES,
    }


def _image(value: Any) -> tuple[bytes | None, str | None]:
    if isinstance(value, dict):
        data = value.get("bytes")
        return data, None if data is not None else value.get("path")
    return (bytes(value), None) if isinstance(value, (bytes, bytearray)) else (None, str(value))


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
    """

    image_root: str | None
    image_roots: Mapping[str, str]
    columns: tuple[str, str, str | None]
    weights: Mapping[str, float]
    cache_dir: str | None

    def open(self, source: Named, split: str) -> tuple[Any, Layout]:
        """Open a source of a split as a `datasets.Dataset`; return it with its layout.

        Raises:
            UserError: If the source does not exist, has another form, or lacks a column.
        """
        spec = as_source(source)
        kind, files, folder = resolve_tables(spec, "questions")
        image, question, answers = self.columns
        columns = (spec.image_column or image, question, spec.caption_column or answers)
        if kind == "json" and (keys := first_keys(files[0])):
            for column, option in zip(columns, ("image_column", "question_column"), strict=False):
                if column not in keys:
                    raise UserError(no_column(str(column), keys, spec.path, option))
        named_root = spec.image_root or self.image_root
        roots = {name: _absolute(path) for name, path in self.image_roots.items()}
        weights = dict(self.weights)
        root = (_absolute(named_root or folder), named_root is None)
        key = ("questions", files, [stamp_of(file) for file in files], columns, roots, weights, root)

        def make() -> Iterator[pa.RecordBatch]:
            return record_batches(read_questions(files, columns, roots, weights, root), QUESTION_RECORD)

        dataset = cached_rows(make, QUESTION_RECORD, key, self.cache_dir, spec.path, split)
        # The paths in the records start with their root.
        return dataset, Layout(spec.path, "image", "caption", None, "", None, FAULT, weight=spec.weight)


def _absolute(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))


class QuestionTable(ImageTable):
    """Rows of an image, a question and answers of one or several memory-mapped sources, concatenated.

    Args:
        sources: the opened sources, each with its layout.
        max_pixels: images with more pixels are refused.
        share: images whose rows are kept, from and up to a share of all; None for all rows.
    """

    def __init__(
        self, sources: list[tuple[Any, Layout]], max_pixels: int, share: tuple[float, float] | None = None
    ) -> None:
        super().__init__(sources, max_pixels)
        self._texts = [dataset.select_columns(list(_TEXTS)) for dataset, _ in sources]
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
        columns = [
            dataset.with_format("arrow")[:][column].fill_null(missing).to_numpy().astype(np.int64)
            for dataset in self._texts
            if dataset is not None
        ]
        return np.concatenate(columns) if columns else np.zeros(0, np.int64)

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
        if self._rows is not None:
            numbers = numbers[self._rows]
        return positions_of(np.where(numbers >= 0, numbers, -1 - np.arange(len(numbers))))

    def texts(self) -> Iterator[str]:
        """Yield all questions and answers of rows without a fault, to train a tokenizer on."""
        for source, (start, stop) in enumerate(itertools.pairwise(self._starts)):
            rows = None
            if self._rows is not None:
                rows = self._rows[(self._rows >= start) & (self._rows < stop)] - start
            columns = (self._readable(source, name, rows) for name in ("question", "caption"))
            for questions, answers in zip(*columns, strict=True):
                for question, texts in zip(questions.to_pylist(), answers.to_pylist(), strict=True):
                    yield question
                    yield from texts

    def check(self, split: Split) -> None:
        """Check that the split has rows, and that at least one of the probed rows can be used.

        Raises:
            UserError: If the split is empty, or no probed row can be used.
        """

        def read(row: int) -> None:
            if not self.question(row).strip():
                raise BadSample(EMPTY_QUESTION, self.name(row))
            if split == "train" and not usable_answers(self.answers(row)):
                raise BadSample(NO_ANSWER, self.name(row))
            self.image(row)

        expected = "images with questions" + (" and answers" if split == "train" else "")
        self.check_rows(split, expected, "check data.image_root, data.image_roots and the column names", read)
