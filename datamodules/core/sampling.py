"""Assignment of rows to batches, as a function of counters and never of saved generator state.

The order of an epoch is a permutation drawn from ``(seed, epoch)`` alone, the same for any number of processes and
loader workers. Global batch ``k`` is rows ``k*N*B .. (k+1)*N*B`` of it (``N`` processes, ``B`` rows per process),
and each process takes its contiguous slice of ``B``. So two integers resume a run exactly: the epoch and the number of
batches done in it.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.utils.data import get_worker_info

from ...common.errors import UserError

Key = tuple[int, int]
"""What the training sampler yields for one sample: (epoch, row). Persistent workers cannot know the epoch otherwise."""

# Each use of the seed has its own number, so that, for example, the order of epoch 3 and the draws of row 3 differ.
_ORDER, _SAMPLE, _SUBSTITUTE, _BLOCK, _SHARDS = range(5)


def generator(*counters: int) -> np.random.Generator:
    """Return a numpy generator that depends only on non-negative counters."""
    return np.random.default_rng(np.random.SeedSequence(counters))


def epoch_order(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the order of all rows in an epoch, the same for any number of processes and workers.

    Returns:
        int64 [length], a permutation.
    """
    return generator(_ORDER, seed, epoch).permutation(length)


def shard_order(seed: int, epoch: int, turn: int, shards: int) -> np.ndarray:
    """Return the order in which the shards of a streamed split are read in the ``turn``-th pass of an epoch."""
    return generator(_SHARDS, seed, epoch, turn).permutation(shards)


def block_order(seed: int, epoch: int, stream: int, block: int, rows: int) -> np.ndarray:
    """Return the order of the rows within one block of a stream."""
    return generator(_BLOCK, seed, epoch, stream, block).permutation(rows)


def substitute(seed: int, epoch: int, row: int, attempt: int, length: int) -> int:
    """Return the row that replaces an unusable one on the given attempt (1, 2, ...)."""
    return int(generator(_SUBSTITUTE, seed, epoch, row, attempt).integers(length))


def sample_words(seed: int, epoch: int, row: int) -> tuple[int, int]:
    """Return the random words of one sample: the 64-bit seed of its transform, the 32-bit draw of its caption."""
    words = np.random.SeedSequence((_SAMPLE, seed, epoch, row)).generate_state(3, np.uint32).tolist()
    return words[0] << 32 | words[1], words[2]


def view_seed(seed: int, view: int) -> int:
    """Return the seed of one of several views of a sample; the seed of view 0 is the sample's own."""
    if not view:
        return seed
    return int(np.random.SeedSequence((seed, view)).generate_state(1, np.uint64)[0])


_kept = False


@contextlib.contextmanager
def kept_draws() -> Iterator[None]:
    """Restore the states of torch's CPU, numpy's and Python's global generators at the end, in the main process.

    So loading without workers does not change the draws of the training step. Of nested contexts the outermost restores
    them: numpy takes 0.15 ms, so a dataset opens one context for a whole batch.
    """
    global _kept
    if _kept or get_worker_info() is not None:
        yield
        return
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    _kept = True
    try:
        yield
    finally:
        _kept = False
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a transform with torch's CPU, numpy's and Python's global generators seeded, and :func:`kept_draws`.

    Accelerator generators are not touched: ``torch.manual_seed`` would reseed them.
    """
    with kept_draws():
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        yield


class TrainingPosition:
    """Return where the next pass over the training loader starts: (epoch, batches already done in it).

    While a trainer fits, the position is read from its batch counter, which Lightning restores from a checkpoint. It is
    read at the first batch, because the counter is restored after the loader is created. Without a trainer, each pass
    is the next epoch.

    Args:
        trainer: the trainer that the datamodule is attached to, if any.
        length: number of batches in a full epoch.
    """

    def __init__(self, trainer: pl.Trainer | None, length: int) -> None:
        self._trainer = trainer
        self._length = length
        self._passes = 0
        self.done = 0  # at the last call

    def __call__(self) -> tuple[int, int]:
        """Return the epoch, and the batches done in it."""
        epoch, self.done = self._read()
        return epoch, self.done

    def _read(self) -> tuple[int, int]:
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.state.status != TrainerStatus.RUNNING:
            self._passes += 1
            return self._passes - 1, 0
        progress = trainer.fit_loop.epoch_loop.batch_progress
        # Not the loader's length, since `limit_train_batches` shortens epochs.
        limit = trainer.num_training_batches
        per_epoch = self._length if math.isinf(limit) else max(1, int(limit))
        total, current = progress.total.ready, progress.current.ready
        if (total - current) % per_epoch == 0:
            return divmod(total, per_epoch)
        # An earlier epoch ended early (`on_train_batch_start` returned -1); the next one started at its first batch.
        return math.ceil((total - current) / per_epoch), current

    @property
    def frozen_order(self) -> bool:
        """Whether the trainer overfits on a few batches, so that each epoch must have the same order."""
        return bool(getattr(self._trainer, "overfit_batches", 0))


def batches_per_epoch(rows: int, batch_size: int, replicas: int) -> int:
    """Return the number of global batches in an epoch of training rows; the rest of the rows is dropped.

    Raises:
        UserError: there is none.
    """
    if rows < batch_size * replicas:
        raise UserError(
            f"Expected at least one global batch of {batch_size * replicas} training rows per epoch ({replicas} "
            f"process(es) with data.batch_size {batch_size}), got {rows}: decrease the batch size or use more data."
        )
    return rows // (batch_size * replicas)


class TrainingBatchSampler:
    """Yield a list of ``(epoch, row)`` for each batch of this process; incomplete global batches are dropped.

    Args:
        length: rows in the split.
        batch_size: rows per process and batch.
        seed: the run's seed.
        rank: index of this process among those that read different data.
        world_size: number of those processes.
        position: where a pass starts.
    """

    def __init__(
        self, length: int, batch_size: int, seed: int, rank: int, world_size: int, position: TrainingPosition
    ) -> None:
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.position = position

    def __len__(self) -> int:
        """Return the number of batches in a full epoch, also if the next pass yields fewer."""
        return self.length // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[Key]]:
        # A generator, so that the position is read at the first batch: torch creates iterators that it never uses.
        epoch, done = self.position()
        yield from self.batches(epoch, done, order_epoch=0 if self.position.frozen_order else epoch)

    def batches(self, epoch: int, done: int = 0, order_epoch: int | None = None) -> Iterator[list[Key]]:
        """Yield the batches of an epoch from batch ``done`` on."""
        order = epoch_order(self.seed, epoch if order_epoch is None else order_epoch, self.length)
        for batch in range(done, len(self)):
            start = (batch * self.world_size + self.rank) * self.batch_size
            yield [(epoch, row) for row in order[start : start + self.batch_size].tolist()]


def evaluation_batches(length: int, batch_size: int, rank: int, world_size: int) -> list[list[int]]:
    """Return this process's share of an evaluation split: each item exactly once over all processes.

    All processes have the same number of batches, so that the collectives of a sharded model match; batch sizes differ
    by at most one instead (and may be one larger than ``batch_size``).

    Raises:
        UserError: there are fewer items than processes.
    """
    if length < world_size:
        raise UserError(
            f"Expected at least one item to evaluate for each of {world_size} processes, got {length}: use fewer "
            "devices or a larger split."
        )
    count = min(math.ceil(math.ceil(length / world_size) / batch_size), length // world_size)
    mine = np.array_split(np.arange(length), world_size)[rank]
    return [part.tolist() for part in np.array_split(mine, count)]
