"""Batches of a streamed set, read in this process by simulated loader workers."""

import itertools
from typing import NamedTuple
from unittest import mock

from vlightning.datamodules.pairs import streams


class Worker(NamedTuple):
    """What a streamed set reads from `torch.utils.data.get_worker_info`."""

    num_workers: int
    id: int


def indices(outcomes):
    """Return the sample indices of a batch."""
    return [outcome.sample.sample_index for outcome in outcomes]


def read(dataset, workers=0):
    """Return the indices of the batches, read by workers one after another; a loader takes their batches in turn."""
    if not workers:
        return [indices(outcomes) for outcomes in dataset]
    parts = []
    for worker in range(workers):
        info = Worker(workers, worker)
        with mock.patch.object(streams, "get_worker_info", return_value=info):
            parts.append([indices(outcomes) for outcomes in dataset])
    return [batch for batches in itertools.zip_longest(*parts) for batch in batches if batch is not None]
