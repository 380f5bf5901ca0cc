"""Reader of questions about images: the lists of ALBEF's authors for VQA, and tables of one's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as pq

from ...common.errors import UserError
from ..base.faults import BadSample
from ..reading.layout import FAULT, Record, captions_in, identity_in, record
from ..reading.lists import read_items
from ..reading.parquet import column_names
from ..reading.remote import is_inside
from ..text.captions import is_text, text_id

SHARES = 1_000_000
"""Largest value, exclusive, of the column `share`, by which images are held out of training."""


def read_questions(
    files: list[str],
    columns: tuple[str, str, str | None],
    roots: dict[str, str],
    weights: dict[str, float],
    root: tuple[str, bool],
    stamp: list[str],
) -> Iterator[Record]:
    """Yield the records of questions.

    Args:
        files: `.json` (a list of objects), `.jsonl`, `.csv` or `.parquet` files.
        columns: keys of the image, the question, and the answers; None for "answers" if it exists, else "answer".
        roots: folder of the images by the value of "dataset", which no path may leave.
        weights: weight of each answer by the value of "dataset".
        root: folder of all other images, and whether paths may leave it.
        stamp: not read; a change of it, with the files, invalidates the cache of the `datasets` library.

    Raises:
        UserError: If a file has another form.
    """
    for file in files:
        for read in _parquet_rows(file) if file.endswith(".parquet") else read_items(file):
            made = record(lambda read=read: _question(read(), columns, roots, weights, root))  # type: ignore[misc]
            if made[FAULT] is not None:
                made |= {"question": None, "question_id": None, "weight": None, "group": None, "share": None}
            yield made


def _question(
    item: Any,
    columns: tuple[str, str, str | None],
    roots: dict[str, str],
    weights: dict[str, float],
    root: tuple[str, bool],
) -> Record:
    if not isinstance(item, dict):
        raise BadSample("no object", "")
    if None in item:  # the CSV reader's key of excess values
        raise BadSample("more values than columns", "")
    image, question, answers = columns
    given, asked = item.get(image), item.get(question)
    if given is None:
        raise BadSample("no image", "")
    if not isinstance(asked, str):
        raise BadSample("no question", "")
    if not is_text(asked):
        raise BadSample("lone surrogate in the question", "")
    dataset = item.get("dataset")
    data, path = _image(given)
    if path is not None:
        folder, free = (roots[dataset], False) if isinstance(dataset, str) and dataset in roots else root
        path = os.path.join(folder, path)
        if not free and not is_inside(path, folder):
            raise BadSample("outside image_root", path)
    group = text_id(path) if path is not None else None
    number = item.get("question_id")
    return {
        "image": {"bytes": data, "path": path},
        "caption": captions_in(item.get(answers or ("answers" if "answers" in item else "answer"))),
        "image_id": None,
        "question": asked,
        "question_id": identity_in(number),
        "weight": weights.get(dataset) if isinstance(dataset, str) else None,
        "group": group,
        # By the path as written, so that an image is held out on every machine.
        "share": text_id(asked if path is None else f"{dataset}\0{given}") % SHARES,
    }


def _image(value: Any) -> tuple[bytes | None, str | None]:
    if isinstance(value, dict):
        data = value.get("bytes")
        return data, None if data is not None else value.get("path")
    return (bytes(value), None) if isinstance(value, (bytes, bytearray)) else (None, str(value))


def _parquet_rows(file: str) -> Iterator[Callable[[], Any]]:
    try:
        column_names(file)  # raises an error for a name that is not unique
        opened = pq.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise UserError(f"Expected a Parquet file, got {file!r} ({error}): correct it.") from error
    for batch in opened.iter_batches(1000):
        yield from (lambda row=row: row for row in batch.to_pylist())
