"""Precomputed embeddings of images, in Parquet files."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ...common.errors import UserError

JoinOn = Literal["image", "image_id"]
_COLUMNS = ("image", "image_id", "embedding")


class Embeddings:
    """Table of embeddings [N, D], indexed by the name or the id of the image.

    Args:
        files: Parquet files, glob patterns or folders of such files, written by `predict` of an
            `ImageEmbeddingModule`.
        join_on: the column by which embeddings are looked up.

    Raises:
        UserError: If no file is found, the files are of different towers, or an image has several embeddings.
    """

    def __init__(self, files: list[str], join_on: JoinOn) -> None:
        paths = [path for file in files for path in _paths(file)]
        tables = [_read(path) for path in paths]
        origins = {(table.schema.metadata or {}).get(b"tower") for table in tables}
        widths = {_width(table, path) for table, path in zip(tables, paths, strict=True)}
        if len(origins) > 1 or len(widths) > 1:
            raise UserError(
                f"Expected embeddings of one tower in data.embeddings, got those of {len(origins)} towers with the "
                f"dimensions {sorted(widths)}: name the files of one tower."
            )
        self.join_on = join_on
        self.paths = paths
        self.values = np.concatenate([_values(table) for table in tables])
        keys = [key for table in tables for key in table[join_on].to_pylist()]
        self._places = {key: place for place, key in enumerate(keys)}
        if len(self._places) < len(keys):
            twice = next(key for place, key in enumerate(keys) if self._places[key] != place)
            raise UserError(
                f"Expected one embedding per {join_on} in data.embeddings, got several for {twice!r}: name each file "
                "once, or set data.join_on."
            )
        origin = origins.pop()
        self.origin: dict[str, str] | None = json.loads(origin) if origin is not None else None

    @property
    def width(self) -> int:
        """The embedding dimension D."""
        return int(self.values.shape[1])

    def __contains__(self, key: str | int) -> bool:
        return key in self._places

    def __getitem__(self, key: str | int) -> torch.Tensor:
        """Return an embedding, float32 [D]."""
        return torch.from_numpy(self.values[self._places[key]])


def _paths(file: str) -> list[Path]:
    path = Path(file).expanduser()
    if path.is_dir():
        found = sorted(path.glob("**/*.parquet"))
    elif glob.has_magic(file) and not path.exists():
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    else:
        found = [path] if path.exists() else []
    if not found:
        raise UserError(
            "Expected Parquet files of embeddings, as `vlightning predict` with an ImageEmbeddingModule writes them, "
            f"got none in {os.fspath(file)!r}: embed the images first, or correct data.embeddings."
        )
    return found


def _read(path: Path) -> Any:
    names = pq.read_schema(path).names
    if not set(_COLUMNS) <= set(names):
        raise UserError(
            f"Expected the columns {', '.join(_COLUMNS)} in {str(path)!r}, as `vlightning predict` with an "
            f"ImageEmbeddingModule writes them, got {', '.join(names)}: set data.embeddings to such a file."
        )
    return pq.read_table(path, columns=list(_COLUMNS))


def _width(table: Any, path: Path) -> int:
    lengths = set(table["embedding"].combine_chunks().value_lengths().to_pylist()) if table.num_rows else set()
    if len(lengths) != 1:
        raise UserError(
            f"Expected embeddings of one dimension in {str(path)!r}, got {table.num_rows} of {len(lengths)} "
            "dimensions: write the file again."
        )
    return int(lengths.pop())


def _values(table: Any) -> np.ndarray:
    column = table["embedding"].combine_chunks()
    flat = column.flatten().cast(pa.float32()).to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), -1)
