"""Denominators of means over all processes, where the number of terms differs between processes."""

import torch
from torch import Tensor

from ...callbacks.distributed.collectives import all_reduce_sum, world_size


def mean_count(count: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of a count over the processes, at least 1 over all of them.

    A sum of losses divided by it, with gradients averaged over the processes, gives the mean over all terms.

    Args:
        count: 0-D, of this process.
        dtype: floating-point type of the result.
    """
    return all_reduce_sum(count.to(dtype)).clamp(min=1) / world_size()
