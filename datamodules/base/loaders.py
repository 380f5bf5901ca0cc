"""Loaders for Lightning: plain iterables around a torch `DataLoader`.

With several processes Lightning replaces the sampler of every `DataLoader` (the new sampler shuffles in training, and
pads with duplicates in evaluation), and creates the loader again for prediction. Lightning does not change other
iterables. The iterables in this file yield the batches of *this* process for any `use_distributed_sampler`, and
separate the counts of unusable samples, which loader workers send, from the batch.
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
    """Loader of batches; each `iter()` starts a new pass when its first batch is requested.

    Args:
        make: creates the inner loader of `Collated` batches.
        length: number of batches; None if it is unknown.
        account: counts unusable samples.
        keep: whether to use one inner loader, with persistent workers, for all passes.
        skip_empty: whether to skip batches without a usable sample; False if all processes need the same number of
            batches.
        started: returns the number of batches before the first batch of the pass; called after that batch is loaded.

    Attributes:
        finish: applied to each batch.
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
        self.finish: Callable[[Batch], Batch] = lambda batch: batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(
                "Expected a loader of known length, got that of a streamed evaluation split: iterate over it."
            )
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        inner = self._inner or self._make()
        if self._keep:
            self._inner = inner
        collated: Collated
        for number, collated in enumerate(inner, start=1):
            self.account.update(collated.num_read, collated.faults)
            self.account.remark(collated.notes)
            if collated.batch is None:
                self.account.fail()
                continue
            if self._started() + number == self._length:
                self.account.end_of_pass()  # before the last batch is yielded, since Lightning does not iterate past it
            if self._skip_empty and len(collated.batch["sample_index"]) == 0:
                continue
            yield self.finish(collated.batch)
        if self._length is None:
            self.account.end_of_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, since the trainer counts the batches.

        Lightning resumes within an epoch only if the loader has this method.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, since the loader has no state."""

    def close(self) -> None:
        """Stop the persistent workers."""
        if self._inner is not None:
            stop_workers(self._inner)
        self._inner = None


class PredictionLoader(BatchLoader):
    """Loader that also passes the indices of the items in each batch to Lightning's prediction writers."""

    def __init__(
        self, batches: list[list[int]], make: Callable[[Any], DataLoader[Any]], account: Account, skip_empty: bool
    ) -> None:
        self.batch_sampler = recorded_batches(batches)
        super().__init__(lambda: make(self.batch_sampler), len(batches), account, keep=False, skip_empty=skip_empty)


def replicas_of(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return the number of processes that read different data, and the index of this one among them.

    The number differs from the world size with tensor parallelism, in which several processes read the same data.
    """
    if trainer is not None:
        sampler = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return sampler["num_replicas"], sampler["rank"]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def inner_loader(dataset: Any, collate: Callable[..., Collated], num_workers: int, **options: Any) -> DataLoader[Any]:
    """Create a torch loader that does not draw from the global generator.

    In each pass a torch loader draws a base seed for the workers; the generator for it is given here.
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
    """Keep a loader worker alive after SIGTERM, SIGINT or SIGUSR1; used as `worker_init_fn`.

    SLURM, and Ctrl-C in a terminal, send these signals to all processes of a run. Without its workers the run could not
    finish the step and write a checkpoint. A signal more than five seconds after the first ends the worker, since torch
    sends SIGTERM to workers that hang.
    """
    times: list[float] = []

    def outlast(number: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        if times[-1] - times[0] > 5:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, outlast)
