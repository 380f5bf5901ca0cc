"""The loaders handed to Lightning: plain iterables around a torch ``DataLoader``.

Lightning replaces the sampler of every ``DataLoader`` that it is given when several processes run (shuffling for
training, padding with duplicates for evaluation), and re-creates it for prediction. It leaves other iterables alone.
These yield the batches of *this* process, whatever ``use_distributed_sampler`` says, and are the place where the loader
workers' account of unusable samples is taken off the batch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader

from .decode import Account
from .samples import Batch, Collated


class BatchLoader:
    """Iterates over batches; a new pass starts at each ``iter()``, at the first batch asked for.

    Args:
        make: makes the inner loader of :class:`Collated` batches.
        length: number of batches, None if unknown.
        account: where unusable samples are counted.
        keep: use one inner loader for all passes (its workers persist).
        skip_empty: leave out batches in which nothing was usable; not where other processes count on the same number.
        started: the number of the pass's first batch, asked once that has come.
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
            raise TypeError("a streamed evaluation split has no length before it is read")
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
                self.account.end_of_pass()  # here, because Lightning does not ask for more than the last batch
            if self._skip_empty and len(collated.batch["sample_index"]) == 0:
                continue
            yield collated.batch
        if self._length is None:
            self.account.end_of_pass()

    def state_dict(self) -> dict[str, Any]:
        """Nothing, the position being the trainer's counter; but Lightning takes a loader with a state as resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Stop the workers that were kept."""
        if self._inner is not None and self._inner._iterator is not None:
            shutdown = getattr(self._inner._iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        self._inner = None


class _Batches:
    """A fixed list of batches as a batch sampler (Lightning's wrapper copies attributes, which a list has none of)."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class PredictionLoader(BatchLoader):
    """A loader that also tells Lightning's prediction writers which items each batch holds.

    Args:
        batches: the item numbers of each batch of this process.
        make: makes the inner loader, given a batch sampler.
        account: where unusable samples are counted.
    """

    def __init__(
        self, batches: list[list[int]], make: Callable[[Any], DataLoader[Any]], account: Account, skip_empty: bool
    ) -> None:
        self.batch_sampler = _IndexBatchSamplerWrapper(_Batches(batches))
        super().__init__(lambda: make(self.batch_sampler), len(batches), account, keep=False, skip_empty=skip_empty)


def inner_loader(dataset: Any, collate: Callable[..., Collated], num_workers: int, **options: Any) -> DataLoader[Any]:
    """A torch loader that draws nothing from the process's own random state.

    (Each pass draws a base seed for the workers, from the global generator unless another is given.)
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
    """Lets a loader's worker live on after SIGTERM, SIGINT or SIGUSR1, as a ``worker_init_fn``.

    SLURM, and Ctrl-C in a terminal, send these to all processes of a run; without its workers it could not finish the
    step and write a checkpoint. One that comes more than five seconds after the first ends the worker: torch, too,
    sends SIGTERM to a worker that hangs.

    Args:
        worker: its number, as torch passes it.
    """
    times: list[float] = []

    def outlast(number: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        if times[-1] - times[0] > 5:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, outlast)
