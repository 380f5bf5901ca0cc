"""Rows of an epoch that come from several sources, each read a given number of times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mix:
    """Rows of the sources of a split, each with a weight.

    Rows are numbered from 0 over all sources. An epoch reads *items*: item ``i`` is row ``i % rows``, and ``i // rows``
    is the number of the repetition, so that each repetition of a row has its own random draws.

    Args:
        sizes: number of rows of each source.
        weights: number of times that an epoch reads each row of a source; a fraction reads a part of the rows that is
            drawn anew for each epoch. None means 1 for all.
    """

    sizes: Sequence[int]
    weights: Sequence[float] | None = None

    @property
    def rows(self) -> int:
        """Number of rows of all sources."""
        return sum(self.sizes)

    def __len__(self) -> int:
        """Return the number of items in an epoch."""
        return sum(map(_items, self.sizes, self._weights))

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """Return the items of an epoch in random order.

        Returns:
            int64 [items]; with weights of 1 a permutation of the rows.
        """
        parts, start = list[np.ndarray](), 0
        for size, weight in zip(self.sizes, self._weights, strict=True):
            whole = int(weight)
            parts += [np.arange(start, start + size) + repetition * self.rows for repetition in range(whole)]
            rest = _items(size, weight) - whole * size
            if rest:
                parts.append(generator.choice(size, rest, replace=False) + start + whole * self.rows)
            start += size
        items = np.concatenate(parts) if parts else np.arange(0)
        return items[generator.permutation(len(items))]

    @property
    def _weights(self) -> Sequence[float]:
        return self.weights if self.weights is not None else [1.0] * len(self.sizes)


def _items(size: int, weight: float) -> int:
    return math.floor(size * weight + 0.5)
