"""From rows to samples and batches, in the loader workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from .faults import BadSample, Fault, Outcome
from .sampling import Key, kept_draws, sample_words, substitute

Transform = Callable[[Image.Image], torch.Tensor]
ATTEMPTS = 20
"""Draws before a batch is given up: if half of the rows are unusable, one sample in a million."""


class Rows(Protocol):
    """Rows of a split with an image each, read in any order."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def image(self, row: int) -> Image.Image:
        """Return the decoded image (RGB); raises :class:`BadSample`."""

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""

    def image_name(self, row: int) -> str:
        """Return the path of the image where it is a file, else the name of the row."""


class Reader(Protocol):
    """Reads a training sample."""

    def __call__(self, row: int, words: tuple[int, int]) -> Any:
        """Read a row with the random words of :func:`sample_words`; raises :class:`BadSample`."""


class SeededSet(Dataset[Outcome]):
    """A dataset whose rows are transformed within :func:`~.sampling.seeded`.

    The states of the process's generators are restored once per batch, since once per row would take longer. A subclass
    has `__len__` and `__getitem__`.
    """

    def __getitems__(self, keys: Sequence[Any]) -> list[Outcome]:
        with kept_draws():
            return [self[key] for key in keys]


class TrainingSet(SeededSet):
    """Training rows, each with its own random words in each epoch; unusable rows are replaced.

    Args:
        length: number of rows.
        read: reads a sample.
        seed: the run's seed.
    """

    def __init__(self, length: int, read: Reader, seed: int) -> None:
        self.length = length
        self.read = read
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Key) -> Outcome:
        epoch, first = key
        faults: list[Fault] = []
        for attempt in range(ATTEMPTS):
            row = substitute(self.seed, epoch, first, attempt, self.length) if attempt else first
            try:
                sample = self.read(row, sample_words(self.seed, epoch, row))
            except BadSample as bad:
                faults.append(bad.fault)
                continue
            return Outcome(sample, attempt + 1, faults)
        return Outcome(None, ATTEMPTS, faults)


def account(outcomes: Sequence[Outcome]) -> tuple[list[Any], int, list[Fault]]:
    """Return the usable samples of a batch, the number of samples read for it, and the faults."""
    samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    return samples, sum(outcome.seen for outcome in outcomes), faults


def stacked(images: list[torch.Tensor]) -> torch.Tensor:
    """Stack images [3, H, W] to a batch [B, 3, H, W]."""
    # Not torch.stack: in a worker, default_collate stacks into shared memory, to which the batch would be copied later.
    batch: torch.Tensor = default_collate(images)
    return batch
