"""Batches of a streamed set, read by the workers of a loader."""

import torch

from support.data.streams import indices


def read_by_loader(dataset, workers):
    """Return the indices of the batches as a loader with so many workers yields them."""
    return list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=indices))
