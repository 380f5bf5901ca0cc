"""Rows of an epoch that come from several sources, each read a given number of times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...common.errors import UserError


@dataclass(frozen=True)
class Mix:
    """Rows of the sources of a split, each with a weight.

    Rows are numbered from 0 over all sources. An epoch reads *items*: item `i` is row `i % rows`, and `i // rows`
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
        return sum(self.counts)

    @property
    def counts(self) -> list[int]:
        """Number of items of each source in an epoch."""
        return list(map(_items, self.sizes, self._weights))

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """Return the items of an epoch in random order.

        Returns:
            int64 [items]; with weights of 1 a permutation of the rows.
        """
        pieces: list[np.ndarray] = []
        start = 0
        for size, weight in zip(self.sizes, self._weights, strict=True):
            repetitions = int(weight)
            pieces += [np.arange(start, start + size) + repetition * self.rows for repetition in range(repetitions)]
            rest = _items(size, weight) - repetitions * size
            if rest:
                pieces.append(generator.choice(size, rest, replace=False) + start + repetitions * self.rows)
            start += size
        items = np.concatenate(pieces) if pieces else np.arange(0)
        return items[generator.permutation(len(items))]

    @property
    def _weights(self) -> Sequence[float]:
        return self.weights if self.weights is not None else [1.0] * len(self.sizes)


def _items(size: int, weight: float) -> int:
    return math.floor(size * weight + 0.5)


def tempered(mix: Mix, temperature: float) -> Mix:
    """Return a mix in which the sources have shares of an epoch proportional to n^(1/T), n being their numbers of rows.

    Multilingual pre-training mixes languages so: T = 5 in Arivazhagan et al., 2019 (arXiv 1907.05019), and an exponent
    of 0.3 in XLM-R (Conneau et al., 2020, arXiv 1911.02116). The rows of an epoch are as many as before, and divided by
    the method of the largest remainder.

    Args:
        mix: sources with weights of 1.
        temperature: T; with 1 the shares are those of the sizes, with infinity they are equal.

    Raises:
        UserError: If sources have other weights, or there is one source only, and T is not 1.
    """
    if temperature == 1:
        return mix
    if any(weight != 1 for weight in mix.weights or ()):
        raise UserError(
            f"Expected weights of the training sources or data.mixing_temperature, got both, a temperature of "
            f"{temperature:g}: remove the weights, or set the temperature to 1."
        )
    if len(mix.sizes) < 2:
        raise UserError(
            f"Expected several training sources with data.mixing_temperature {temperature:g}, got one: add a source, "
            "or set it to 1."
        )
    sizes = np.array(mix.sizes)
    shares = np.where(sizes > 0, (sizes / max(sizes.max(), 1)) ** (1 / temperature), 0)
    exact = mix.rows * shares / max(shares.sum(), 1)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: mix.rows - counts.sum()]] += 1
    return Mix(mix.sizes, (counts / np.maximum(sizes, 1)).tolist())
