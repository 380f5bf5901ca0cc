"""Reading of rows as samples and batches, in the loader workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from .decode import Decoder, decoding_by
from .faults import BadSample, Fault, Outcome
from .sampling import Key, preserve_rng_states, sample_numbers, substitute

Transform = Callable[[Image.Image], torch.Tensor]
ATTEMPTS = 20
"""Number of attempts to read a usable sample; if half of the rows are unusable, one sample in a million fails."""


class Rows(Protocol):
    """Rows of a split with one image each, in random access."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def image(self, row: int) -> Image.Image:
        """Return the decoded image (RGB); raises `BadSample`."""

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""

    def image_name(self, row: int) -> str:
        """Return the path of an image file, or the name of the row if the data contains the image."""


class Reader(Protocol):
    """Reader of training samples."""

    def __call__(self, row: int, numbers: tuple[int, int]) -> Any:
        """Read a row.

        Args:
            row: index of the row.
            numbers: random numbers of the row, from `sample_numbers`.

        Raises:
            BadSample: If the row cannot be used.
        """


class SeededSet(Dataset[Outcome]):
    """Dataset whose rows are transformed within `seeded`.

    The states of the process's generators are restored once per batch, which is faster than once per row. A subclass
    defines `__len__` and `__getitem__`.
    """

    decoder: Decoder = "pillow"

    def __getitems__(self, keys: Sequence[Any]) -> list[Outcome]:
        with preserve_rng_states(), decoding_by(self.decoder):
            return [self[key] for key in keys]


@dataclass(eq=False)
class TrainingSet(SeededSet):
    """Training samples, each with its own random numbers in each epoch; unusable rows are replaced.

    A key is an epoch and an item, see `Mix`.

    Args:
        length: number of rows.
        read: reader of samples.
        seed: the run's seed.
    """

    length: int
    read: Reader
    seed: int

    def __len__(self) -> int:
        return self.length

    def sample(self, epoch: int, item: int) -> Any:
        """Read the row of an item with the item's random numbers of an epoch; raises `BadSample`."""
        return self.read(item % self.length, sample_numbers(self.seed, epoch, item))

    def __getitem__(self, key: Key) -> Outcome:
        epoch, planned = key
        faults: list[Fault] = []
        for attempt in range(ATTEMPTS):
            item = substitute(self.seed, epoch, planned, attempt, self.length) if attempt else planned
            try:
                sample = self.sample(epoch, item)
            except BadSample as bad:
                faults.append(bad.fault)
                continue
            return Outcome(sample, attempt + 1, faults)
        return Outcome(None, ATTEMPTS, faults)


@dataclass(eq=False)
class EvaluationRows(SeededSet):
    """Rows of an evaluation split, one sample each; unusable rows are skipped, never replaced.

    Args:
        length: number of rows.
        read: reader of samples, without randomness in its transform.
        seed: the run's seed, so that a random transform has the same draws in each evaluation.
    """

    length: int
    read: Reader
    seed: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Outcome:
        try:
            return Outcome(self.read(row, sample_numbers(self.seed, 0, row)), 1, [])
        except BadSample as bad:
            return Outcome(None, 1, [bad.fault])


def usable_samples(outcomes: Sequence[Outcome]) -> tuple[list[Any], int, list[Fault]]:
    """Return the usable samples of a batch, the number of samples that were read, and the faults."""
    samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    return samples, sum(outcome.num_read for outcome in outcomes), faults


def stacked(images: list[torch.Tensor]) -> torch.Tensor:
    """Stack images [3, H, W] to a batch [B, 3, H, W]."""
    # Not torch.stack: in a worker, default_collate stacks into shared memory and so saves a copy.
    batch: torch.Tensor = default_collate(images)
    return batch


def empty_images(transform: Transform) -> torch.Tensor:
    """Return an empty batch [0, 3, H, W] with the image size of a transform."""
    return transform(Image.new("RGB", (32, 32)))[None][:0]
