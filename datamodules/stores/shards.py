"""Shards of a store: Arrow files with one record batch, of which single rows are read from the mapped file.

Shapes: N rows of a shard, K views of an image, D and E dimensions of features of images and of texts, T captions of all
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ...common.files import replacing

SUFFIX = ".arrow"
NOT_FINITE = "embedding not finite"
"""Fault of a row."""
IMAGE, IMAGE_ID, KEY, FAULT, FEATURES = "image", "image_id", "key", "fault", "image_features"
CAPTIONS, TEXT_FEATURES, LABEL = "captions", "text_features", "label"


@dataclass
class ShardRows:
    """Rows of a shard while it is written.

    Args:
        names: path of the image of each row, or its source and row.
        image_ids: numbers that are equal for rows of the same image; None for a row without one.
        keys: hashes of file names or contents of images (`row_key`); None for a row without an image.
        faults: why a row cannot be used, by row; None for a usable one.
        features: features of the images, float32 [N, K, D], zeros for rows with a fault; None without images.
        captions: captions of each row.
        text_features: features of all captions, float32 [T, E]; None without texts.
        labels: class of each row, -1 for none; None without labels.
    """

    names: list[str] = field(default_factory=list)
    image_ids: list[int | None] = field(default_factory=list)
    keys: list[int | None] = field(default_factory=list)
    faults: list[str | None] = field(default_factory=list)
    features: torch.Tensor | None = None
    captions: list[list[str]] = field(default_factory=list)
    text_features: torch.Tensor | None = None
    labels: list[int] | None = None

    def between(self, start: int, stop: int) -> ShardRows:
        """Return some of the rows, with their captions."""
        part = slice(start, stop)
        first = sum(map(len, self.captions[:start]))
        last = first + sum(map(len, self.captions[part]))
        return ShardRows(
            self.names[part],
            self.image_ids[part],
            self.keys[part],
            self.faults[part],
            None if self.features is None else self.features[part],
            self.captions[part],
            None if self.text_features is None else self.text_features[first:last],
            None if self.labels is None else self.labels[part],
        )


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of a shard."""
    return folder / f"{number:08d}{SUFFIX}"


def write_shard(path: Path, rows: ShardRows) -> None:
    """Write a shard atomically; equal rows give equal bytes."""
    columns: dict[str, pa.Array] = {
        IMAGE: pa.array(rows.names, pa.string()),
        IMAGE_ID: pa.array(rows.image_ids, pa.int64()),
        KEY: pa.array(rows.keys, pa.int64()),
        FAULT: pa.array(rows.faults, pa.string()),
    }
    if rows.features is not None:
        columns[FEATURES] = _vectors(rows.features.reshape(len(rows.features), -1))
    if rows.text_features is not None:
        starts = np.cumsum([0, *map(len, rows.captions)]).astype(np.int32)
        columns[CAPTIONS] = pa.ListArray.from_arrays(
            starts, pa.array([text for texts in rows.captions for text in texts], pa.string())
        )
        columns[TEXT_FEATURES] = pa.ListArray.from_arrays(starts, _vectors(rows.text_features))
    if rows.labels is not None:
        columns[LABEL] = pa.array(rows.labels, pa.int64())
    batch = pa.record_batch(list(columns.values()), list(columns))
    with replacing(path) as staged, pa.OSFile(str(staged), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _vectors(features: torch.Tensor) -> pa.Array:
    values = features.detach().cpu().float().contiguous().numpy()
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


class Shard:
    """A shard that is read from its mapped file.

    Args:
        path: the file.

    Raises:
        OSError: If the file cannot be read.
        pyarrow.ArrowInvalid: If it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @cached_property
    def images(self) -> np.ndarray:
        """The features of the images, float32 [N, K * D], without a copy."""
        return _matrix(self.batch.column(FEATURES))

    @cached_property
    def texts(self) -> np.ndarray:
        """The features of all captions, float32 [T, E], without a copy."""
        return _matrix(self.batch.column(TEXT_FEATURES).values)

    @cached_property
    def text_starts(self) -> np.ndarray:
        """The position of the first caption of each row, and the number of captions, int32 [N + 1]."""
        return np.asarray(self.batch.column(CAPTIONS).offsets.to_numpy())

    def captions(self, row: int) -> list[str]:
        """Return the captions of a row."""
        captions: list[str] = self.batch.column(CAPTIONS)[row].as_py()
        return captions

    def value(self, column: str, row: int) -> str | int | None:
        """Return a value of a column without features."""
        value: str | int | None = self.batch.column(column)[row].as_py()
        return value

    def values(self, column: str) -> list[Any]:
        """Return all values of a column without features: texts, integers, or None."""
        values: list[Any] = self.batch.column(column).to_pylist()
        return values


def _matrix(column: pa.Array) -> np.ndarray:
    flat: np.ndarray = column.flatten().to_numpy(zero_copy_only=True)
    return flat.reshape(len(column), column.type.list_size)


def finished_shards(folder: Path, shards: int) -> set[int]:
    """Return the numbers of the shards that exist."""
    return {number for number in range(shards) if shard_path(folder, number).is_file()}


def counted(shard: Shard) -> Mapping[str, int]:
    """Return how many rows of a shard cannot be used, by cause."""
    causes: dict[str, int] = {}
    for cause in shard.values(FAULT):
        if isinstance(cause, str):
            causes[cause] = causes.get(cause, 0) + 1
    return causes


def caption_count(shards: Sequence[Shard]) -> int:
    """Return the number of captions of shards."""
    return sum(int(shard.text_starts[-1]) for shard in shards)
