"""Batches of streamed rows, read in this process."""

import itertools

import torch

from vlightning.datamodules.pairs.streams import StreamedPairReader
from vlightning.datamodules.streams.reader import StreamBatchSampler, StreamedSet


class AnyCaption:
    """Stands in for a TextEncoder where only usability is asked."""

    @staticmethod
    def usable(caption):
        return bool(caption)


def size_of(image):
    return torch.tensor([float(image.width)])


def streamed(
    rows, done=0, batches=6, replicas=(1, 0), batch_size=4, block=7, seed=2, epoch=0, transform=size_of, **options
):
    """Return dataset and batch sampler of the training batches of a process from a batch on."""
    read = StreamedPairReader(rows, transform, AnyCaption())
    sampler = StreamBatchSampler(rows, seed, batch_size, batches, block, replicas, lambda: (epoch, done), **options)
    return StreamedSet(rows, read, seed), sampler


def outcomes(rows, **options):
    """Yield the outcomes of each batch, read in this process; options as in `streamed`."""
    dataset, sampler = streamed(rows, **options)
    for keys in sampler:
        yield dataset.__getitems__(keys)


def indices(batch):
    """Return the sample indices of a batch."""
    return [outcome.sample.sample_index for outcome in batch]


def read(rows, **options):
    """Return the indices of the batches, read in this process; options as in `streamed`."""
    return list(map(indices, outcomes(rows, **options)))


def global_batches(rows, processes, batch_size, **options):
    """Return the indices of each batch of all processes together; options as in `read`."""
    parts = [
        read(rows, replicas=(processes, rank), batch_size=batch_size // processes, **options)
        for rank in range(processes)
    ]
    return [list(itertools.chain.from_iterable(pieces)) for pieces in zip(*parts, strict=True)]
