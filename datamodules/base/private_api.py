"""All private names of Lightning and torch that the datamodules use.

Each name is used once, with the reason why no public name suffices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
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


def replace_hyperparameters(module: pl.LightningDataModule, values: Mapping[str, Any]) -> None:
    """Replace the recorded hyperparameters; Lightning offers no way to change a value that it has recorded."""
    module.hparams.clear()
    module.hparams.update(values)
    recorded: Any = module
    recorded._hparams_initial = copy.deepcopy(module.hparams)
