"""Search in a store by cosine: exact in blocks, or by an index of usearch above a number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...common.errors import UserError
from ...common.files import replacing
from ...common.manifest import MANIFEST, byte_size
from ...datamodules.stores.store import FeatureStore, Side
from ...metrics.search import Hits, exact_search, search_recall

INDEXED_ABOVE = 100_000
"""Rows above which an index of usearch is faster than the exact search by more than its recall costs."""
BLOCK = 16_384
"""Most rows in a block; a block is never larger than a shard."""
INDEX = {"image": "images.usearch", "text": "texts.usearch"}
PROBES = 100
"""Rows whose nearest rows are searched in both ways, for the recall of an index."""
Method = Literal["auto", "exact", "index"]


class StoreSearch:
    """Search among the plain or the first views of the images of a store, or among its texts.

    Args:
        store: the store.
        side: what is searched.
        method: "index" for usearch, "exact", or "auto" for usearch above `INDEXED_ABOVE` rows if it is installed.

    Raises:
        UserError: If the store has no such features, or usearch is asked for and missing.
    """

    def __init__(self, store: FeatureStore, side: Side, method: Method = "auto") -> None:
        if store.sides[side] is None:
            raise UserError(f"Expected {side}s in the store {str(store.folder)!r}, got none: embed them.")
        if not store.sides[side]["projected"]:
            raise UserError(
                f"Expected {side}s in the space of both towers in {str(store.folder)!r}, got features before the "
                "projection of a training: embed the data with the trained model."
            )
        self.store = store
        self.side: Side = side
        self._factors: list[np.ndarray] = []  # of each shard
        installed = find_spec("usearch") is not None
        if method == "index" and not installed:
            raise UserError("Expected the package usearch for an index, got none: pip install 'vlightning[search]'.")
        self.indexed = method == "index" or (method == "auto" and installed and len(self) > INDEXED_ABOVE)

    def __len__(self) -> int:
        if self.side == "image":
            return len(self.store)
        return sum(len(shard.texts) for shard in self.store.shards)

    def blocks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield blocks of features: number of the first row or caption, features [n, E], factors to unit length [n].

        The factor of a row without usable features is NaN. Features are those of the mapped file, without a copy.
        """
        start = 0
        for number, shard in enumerate(self.store.shards):
            features = shard.texts if self.side == "text" else shard.images[:, : self.store.width("image")]
            if number == len(self._factors):
                self._factors.append(_factors(features))
            for first in range(0, len(features), BLOCK):
                block = slice(first, first + BLOCK)
                yield start + first, features[block], self._factors[number][block]
            start += len(features)

    def search(self, queries: Tensor, count: int) -> Hits:
        """Return the rows, or the captions, with the highest cosines with unit-length queries [Q, E]."""
        return self._by_index(queries, count) if self.indexed else self.exact(queries, count)

    def exact(self, queries: Tensor, count: int) -> Hits:
        """Return what `search` does, from all features."""
        query_rows = queries.float().numpy()
        scores = (
            (torch.arange(start, start + len(rows)), torch.from_numpy((query_rows @ rows.T) * factors))
            for start, rows, factors in self.blocks()
        )
        hits = exact_search(scores, count)
        usable = int(hits.score.isfinite().sum(1).min()) if len(hits.score) else 0
        return Hits(hits.row[:, :usable], hits.score[:, :usable])

    def _by_index(self, queries: Tensor, count: int) -> Hits:
        matches = self.index.search(queries.float().numpy(), min(count, len(self.index)))
        rows = torch.from_numpy(np.atleast_2d(matches.keys).astype(np.int64))
        return Hits(rows, 1 - torch.from_numpy(np.atleast_2d(matches.distances)).float())

    def recall(self, count: int) -> float:
        """Return the share of exact hits of `PROBES` evenly spaced rows that the search has among its own."""
        probes = np.unique(np.linspace(0, len(self) - 1, PROBES).astype(int))
        parts = []
        for start, rows, factors in self.blocks():
            inside = probes[(probes >= start) & (probes < start + len(rows))] - start
            unit = rows[inside] * factors[inside, None]
            parts.append(torch.from_numpy(unit[np.isfinite(unit).all(1)]))
        queries = torch.cat(parts)
        return search_recall(self.search(queries, count), self.exact(queries, count))

    @cached_property
    def index(self) -> Any:
        """The index of usearch, which is written beside the shards at its first use."""
        from usearch.index import Index

        path = self.store.folder / INDEX[self.side]
        if self._is_current(path):
            return Index.restore(str(path), view=True)
        index = Index(ndim=self.store.width(self.side), metric="ip", dtype="f16")
        for start, rows, factors in self.blocks():
            usable = np.isfinite(factors)
            index.add(np.arange(start, start + len(rows))[usable], rows[usable] * factors[usable, None])
        with replacing(path) as staged:
            index.save(str(staged))
        return Index.restore(str(path), view=True)

    def _is_current(self, path: Path) -> bool:
        """Return whether an index is at least as new as the store."""
        manifest = self.store.folder / MANIFEST
        return path.is_file() and path.stat().st_mtime_ns >= manifest.stat().st_mtime_ns

    def described(self, count: int) -> str:
        """Return how the store is searched, as one line of the output, with the recall of an index at `count` hits."""
        what = f"{len(self):,} {self.side}s of {self.store.width(self.side)} dimensions"
        if not self.indexed:
            hint = " (the extra search has an index)" if len(self) > INDEXED_ABOVE else ""
            return f"Exact search in {what}{hint}."
        recall = self.recall(count)  # makes the index
        size = byte_size((self.store.folder / INDEX[self.side]).stat().st_size)
        return f"usearch's index of {what}, {size}; recall at {count} against the exact search: {recall:.4f}."


def _factors(features: np.ndarray) -> np.ndarray:
    """Return what scales features [n, E] to unit length, float32 [n]: NaN for zeros, which stand for a bad row."""
    lengths = np.sqrt(np.einsum("ne,ne->n", features, features))
    usable = np.isfinite(lengths) & (lengths > 0)
    factors: np.ndarray = np.where(usable, 1 / np.where(usable, lengths, 1), np.nan).astype(np.float32)
    return factors
