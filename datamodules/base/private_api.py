"""All private names of Lightning and torch that the datamodules use.

Each name is used once, with the reason why no public name suffices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader


class _Batches:
    """Batch sampler of fixed batches; a list is not enough, since the wrapper copies attributes."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def recorded_batches(batches: list[list[int]]) -> Any:
    """Return a batch sampler from which Lightning reads the indices of the items in each predicted batch.

    Prediction writers get `batch_indices` only from a sampler of this class.
    """
    return _IndexBatchSamplerWrapper(_Batches(batches))


def stop_workers(loader: DataLoader[Any]) -> None:
    """Stop the persistent workers of a loader; torch stops them only when the loader is garbage-collected."""
    shutdown = getattr(loader._iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()
