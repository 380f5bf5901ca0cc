"""Batches of streamed rows, read by the workers of a loader."""

import torch

from support.data.streams import indices, streamed


def read_by_loader(rows, workers, **options):
    """Return the indices of the batches that a loader with so many workers yields; options as in `streamed`."""
    dataset, sampler = streamed(rows, **options)
    return list(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=indices))
