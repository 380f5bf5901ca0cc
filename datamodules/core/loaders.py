"""The loaders given to Lightning: plain iterables around a torch ``DataLoader``.

With several processes Lightning replaces the sampler of every ``DataLoader`` (it shuffles for training, and pads with
duplicates for evaluation), and creates the loader again for prediction; other iterables it leaves unchanged. These
iterables yield the batches of *this* process for any ``use_distributed_sampler``, and separate the loader workers'
counts of unusable samples from the batch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from .faults import Account, Batch, Collated
from .private_api import recorded_batches, stop_workers


class BatchLoader:
    """Iterate over batches; each ``iter()`` starts a new pass when its first batch is requested.

    Args:
        make: creates the inner loader of :class:`Collated` batches.
        length: number of batches, None if unknown.
        account: counts unusable samples.
        keep: whether to use one inner loader for all passes (its workers persist).
        skip_empty: whether to skip batches without a usable sample; not if other processes rely on the same number.
        started: returns the number of the first batch of the pass; called once that batch is there.
    """

    def __init__(
        self,
        make: Callable[[], DataLoader[Any]],
        length: int | None,
        account: Account,
        keep: bool,
        skip_empty: bool = False,
        started: Callable[[], int] = lambda: 0,
    ) -> None:
        self._make = make
        self._length = length
        self.account = account
        self._keep = keep
        self._skip_empty = skip_empty
        self._started = started
        self._inner: DataLoader[Any] | None = None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("A streamed evaluation split has no length before it is read.")
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        inner = self._inner or self._make()
        if self._keep:
            self._inner = inner
        collated: Collated
        for number, collated in enumerate(inner, start=1):
            self.account.update(collated.seen, collated.faults)
            self.account.remark(collated.notes)
            if collated.batch is None:
                self.account.fail()
                continue
            if self._started() + number == self._length:
                self.account.end_of_pass()  # here, because Lightning does not iterate past the last batch
            if self._skip_empty and len(collated.batch["sample_index"]) == 0:
                continue
            yield collated.batch
        if self._length is None:
            self.account.end_of_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return no state, since the trainer counts the batches; Lightning resumes mid-epoch only with this method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing."""

    def close(self) -> None:
        """Stop the persistent workers."""
        if self._inner is not None:
            stop_workers(self._inner)
        self._inner = None


class PredictionLoader(BatchLoader):
    """A loader that also gives Lightning's prediction writers the item numbers of each batch.

    Args:
        batches: the item numbers of each batch of this process.
        make: creates the inner loader, given a batch sampler.
        account: counts unusable samples.
        skip_empty: as in :class:`BatchLoader`.
    """

    def __init__(
        self, batches: list[list[int]], make: Callable[[Any], DataLoader[Any]], account: Account, skip_empty: bool
    ) -> None:
        self.batch_sampler = recorded_batches(batches)
        super().__init__(lambda: make(self.batch_sampler), len(batches), account, keep=False, skip_empty=skip_empty)


def replicas_of(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return the number of processes that read different data, and the index of this one among them.

    (This is not always the world size: with tensor parallelism, several processes read the same data.)
    """
    if trainer is not None:
        known = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return known["num_replicas"], known["rank"]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def inner_loader(dataset: Any, collate: Callable[..., Collated], num_workers: int, **options: Any) -> DataLoader[Any]:
    """Create a torch loader that does not draw from the global generator.

    (Each pass draws a base seed for the workers, from the global generator unless another one is given.)
    """
    return DataLoader(
        dataset,
        collate_fn=collate,
        num_workers=num_workers,
        worker_init_fn=outlast_signals,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def outlast_signals(worker: int) -> None:
    """Keep a loader worker alive after SIGTERM, SIGINT or SIGUSR1; used as ``worker_init_fn``.

    SLURM, and Ctrl-C in a terminal, send these signals to all processes of a run, which could not finish the step and
    write a checkpoint without its workers. A signal more than five seconds after the first ends the worker, since torch
    sends SIGTERM to workers that hang.

    Args:
        worker: number of the worker, passed by torch.
    """
    times: list[float] = []

    def outlast(number: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        if times[-1] - times[0] > 5:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, outlast)
