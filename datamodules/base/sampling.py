"""Assignment of rows to batches, as a function of counters and not of the state of a generator.

The order of an epoch is a permutation drawn from `(seed, epoch)` alone, the same for any number of processes and
loader workers. Global batch `k` is rows `k*N*B .. (k+1)*N*B` of it (`N` processes, `B` rows per process),
and each process takes its contiguous slice of `B`. Two integers therefore resume a run exactly: the epoch, and the
number of batches done in it.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import get_worker_info

from ...common.errors import UserError
from .mixing import Mix

Key = tuple[int, int]
"""Key of a training sample: (epoch, item of a `Mix`). Persistent workers do not know the epoch otherwise."""

# Each use of the seed has its own number, so that the order of epoch 3 and the draws of row 3, for example, differ.
_ORDER, _SAMPLE, _SUBSTITUTE, _BLOCK, _SHARDS, _CHUNKS = range(6)


def generator(*counters: int) -> np.random.Generator:
    """Return a numpy generator that depends only on non-negative counters."""
    return np.random.default_rng(np.random.SeedSequence(counters))


def epoch_order(seed: int, epoch: int, mix: Mix) -> np.ndarray:
    """Return the order of the items in an epoch, the same for any number of processes and workers.

    Returns:
        int64 [items].
    """
    return mix.order(generator(_ORDER, seed, epoch))


def shard_generator(seed: int, epoch: int, pass_number: int) -> np.random.Generator:
    """Return the generator of the order in which the shards of a streamed split are read in a pass of an epoch."""
    return generator(_SHARDS, seed, epoch, pass_number)


def chunk_generator(seed: int, epoch: int, pass_number: int, window: int) -> np.random.Generator:
    """Return the generator of the order of the chunks of some shards, a window of a pass."""
    return generator(_CHUNKS, seed, epoch, pass_number, window)


def block_order(seed: int, epoch: int, block: int, slots: int, depth: int) -> np.ndarray:
    """Return which of its rows each slot gives to each batch of a block of a stream, int64 [slots, depth]."""
    rows = np.tile(np.arange(depth), (slots, 1))
    return generator(_BLOCK, seed, epoch, block).permuted(rows, axis=1)


def substitute(seed: int, epoch: int, row: int, attempt: int, length: int) -> int:
    """Return the row that replaces an unusable one on the given attempt (1, 2, ...)."""
    return int(generator(_SUBSTITUTE, seed, epoch, row, attempt).integers(length))


def sample_numbers(seed: int, epoch: int, row: int) -> tuple[int, int]:
    """Return the random numbers of one sample: a 64-bit seed for its transform, and 32 bits that select its caption.

    Each repetition of a row in an epoch has another number `row`, of any size.
    """
    numbers = np.random.SeedSequence((_SAMPLE, seed, epoch, row)).generate_state(3, np.uint32).tolist()
    return numbers[0] << 32 | numbers[1], numbers[2]


def view_seed(seed: int, view: int) -> int:
    """Return the seed of one of several views of a sample; the seed of view 0 is the sample's own."""
    if not view:
        return seed
    return int(np.random.SeedSequence((seed, view)).generate_state(1, np.uint64)[0])


_states_preserved = False


@contextlib.contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Restore the states of torch's CPU, numpy's and Python's global generators on exit, in the main process.

    Loading without workers then does not change the draws of the training step. The outermost of nested contexts
    restores the states; numpy takes 0.15 ms, so a dataset opens one context per batch.
    """
    global _states_preserved
    if _states_preserved or get_worker_info() is not None:
        yield
        return
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    _states_preserved = True
    try:
        yield
    finally:
        _states_preserved = False
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a transform with torch's CPU, numpy's and Python's global generators seeded, and `preserve_rng_states`.

    The generators of accelerators are not changed, as they would be by `torch.manual_seed`.
    """
    with preserve_rng_states():
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        yield


class TrainingPosition:
    """Position at which the next pass over the training loader starts: the epoch, and the batches already done in it.

    While a trainer fits, the position is read from its batch counter, which Lightning restores from a checkpoint. The
    counter is read at the first batch, since it is restored after the loader is created. Without a trainer, each pass
    is the next epoch.
    """

    def __init__(self, trainer: pl.Trainer | None, length: int) -> None:
        self._trainer = trainer
        self._length = length
        self._passes = 0
        self.done = 0  # at the last call

    def __call__(self) -> tuple[int, int]:
        """Return the epoch, and the number of batches done in it."""
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
        total = progress.total.ready
        current = progress.current.ready
        if (total - current) % per_epoch == 0:
            return divmod(total, per_epoch)
        # An earlier epoch ended early (`on_train_batch_start` returned -1); the next one started at its first batch.
        return math.ceil((total - current) / per_epoch), current

    @property
    def frozen_order(self) -> bool:
        """Whether the trainer overfits on a few batches, so that each epoch must have the same order."""
        return bool(getattr(self._trainer, "overfit_batches", 0))


def share_of_batch(global_batch_size: int, replicas: int) -> int:
    """Return the rows of one process in a global batch.

    Raises:
        UserError: If the processes do not divide it evenly.
    """
    share, rest = divmod(global_batch_size, replicas)
    if rest:
        raise UserError(
            f"Expected a data.global_batch_size that the {replicas} processes divide evenly, got {global_batch_size}: "
            "use another number of devices, or set another global batch and its learning rate."
        )
    return share


def batches_per_epoch(rows: int, batch_size: int, replicas: int) -> int:
    """Return the number of global batches in an epoch of training rows; remaining rows are dropped.

    Raises:
        UserError: If the rows do not fill one global batch.
    """
    if rows < batch_size * replicas:
        raise UserError(
            f"Expected at least one global batch of {batch_size * replicas} training rows per epoch ({replicas} "
            f"process(es) with data.batch_size {batch_size}), got {rows}: decrease the batch size or use more data."
        )
    return rows // (batch_size * replicas)


def compare_order(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare what the order of samples depends on in the run of a checkpoint and in this run; warn of a difference.

    Returns:
        What differs, in clauses, if the number of processes differs: it is then reported with all that this changes.

    Raises:
        UserError: If a stream would have another order, and so read some rows twice and others never.
    """
    if now["stream"] and then["stream"] and "order" not in then["stream"]:
        raise UserError(
            "Expected a checkpoint whose stream has an order of its own, got one of an earlier release, which divided "
            "the shards among the loader workers: finish the run with that release, or start anew from its weights."
        )
    differing = [
        f"{name} {value} instead of {then['stream'][name]}"
        for name, value in now["stream"].items()
        if then["stream"].get(name, value) != value
    ]
    if differing:
        raise UserError(
            f"Expected a stream in the order of the run of the checkpoint, got {', '.join(differing)}, with which some "
            "rows would be read twice and others never: set what differs as it was (a global batch by "
            "data.global_batch_size), or start anew."
        )
    sizes_then = then["global_batch_size"], then["rows"]
    sizes_now = now["global_batch_size"], now["rows"]
    if sizes_now == sizes_then:
        return []
    if then["processes"] != now["processes"]:
        return [
            f"a global batch has {sizes_now[0]} of {sizes_now[1]} training rows, not {sizes_then[0]} of "
            f"{sizes_then[1]} (set data.global_batch_size)"
        ]
    rank_zero_warn(
        f"The run of the checkpoint had a global batch of {sizes_then[0]} from {sizes_then[1]} training rows, this "
        f"run has {sizes_now[0]} from {sizes_now[1]}: the order of samples does not continue exactly."
    )
    return []


@dataclass(eq=False)
class TrainingBatchSampler:
    """Batch sampler of `(epoch, item)` keys for this process; incomplete global batches are dropped.

    Args:
        mix: rows of the split, whose items an epoch reads.
        batch_size: rows per process and batch.
        seed: the run's seed.
        rank: index of this process among those that read different data.
        world_size: number of those processes.
        position: start of a pass.
    """

    mix: Mix
    batch_size: int
    seed: int
    rank: int
    world_size: int
    position: TrainingPosition

    def __len__(self) -> int:
        """Return the number of batches in a full epoch, even if the next pass starts later."""
        return len(self.mix) // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[Key]]:
        # A generator reads the position at the first batch; torch also creates iterators that it never uses.
        epoch, done = self.position()
        yield from self.batches(epoch, done, order_epoch=0 if self.position.frozen_order else epoch)

    def batches(self, epoch: int, done: int = 0, order_epoch: int | None = None) -> Iterator[list[Key]]:
        """Yield the batches of an epoch, starting at batch `done`."""
        order = epoch_order(self.seed, epoch if order_epoch is None else order_epoch, self.mix)
        for batch in range(done, len(self)):
            start = (batch * self.world_size + self.rank) * self.batch_size
            yield [(epoch, item) for item in order[start : start + self.batch_size].tolist()]


def evaluation_batches(length: int, batch_size: int, rank: int, world_size: int) -> list[list[int]]:
    """Return the batches of this process in an evaluation; each item is in one batch of one process.

    All processes have the same number of batches, so that the collectives of a sharded model match. Batch sizes differ
    by at most one, and may be one larger than `batch_size`.

    Returns:
        The indices of the items in each batch.

    Raises:
        UserError: If there are fewer items than processes.
    """
    if length < world_size:
        raise UserError(
            f"Expected at least one item to evaluate for each of {world_size} processes, got {length}: use fewer "
            "devices or a larger split."
        )
    count = min(math.ceil(math.ceil(length / world_size) / batch_size), length // world_size)
    items = np.array_split(np.arange(length), world_size)[rank]
    return [batch.tolist() for batch in np.array_split(items, count)]
