"""Running statistics of BatchNorm when a batch goes through a network in slices, and each slice is recomputed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def _training_norms(network: nn.Module) -> list[BatchNorm]:
    """Return the layers whose running statistics a forward pass would update."""
    return [
        module
        for module in network.modules()
        if isinstance(module, BatchNorm) and module.training and module.running_mean is not None
    ]


@contextmanager
def kept_statistics(network: nn.Module) -> Iterator[None]:
    """Keep running statistics unchanged in the forward passes inside, such as recomputations."""
    norms = _training_norms(network)
    before = [(_statistics(norm)[2].clone(), norm.momentum) for norm in norms]
    for norm in norms:
        # Not `track_running_stats = False`: a recomputation would then save other tensors than the first pass.
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (count, momentum) in zip(norms, before, strict=True):
            _statistics(norm)[2].copy_(count)
            norm.momentum = momentum


@contextmanager
def one_update(network: nn.Module) -> Iterator[None]:
    """Count all forward passes inside as one batch: update running statistics once, by the mean of the passes."""
    norms = _training_norms(network)
    before: list[tuple[Tensor, Tensor, Tensor, float | None]] = []
    for norm in norms:
        mean, var, count = _statistics(norm)
        before.append((mean.clone(), var.clone(), count, norm.momentum))
        norm.momentum = None  # the mean over the passes since the count was zero
        # The layer divides by the count, and would synchronise in each pass if the count were on the device.
        norm.num_batches_tracked = torch.zeros_like(count, device="cpu")
    try:
        yield
    finally:
        with torch.no_grad():
            for norm, (old_mean, old_var, count, momentum) in zip(norms, before, strict=True):
                mean, var, passes = _statistics(norm)
                norm.num_batches_tracked, norm.momentum = count, momentum
                if not passes:
                    continue
                count.add_(1)
                share = momentum if momentum is not None else 1 / count.to(mean.dtype)
                mean.copy_(torch.lerp(old_mean, mean, share))
                var.copy_(torch.lerp(old_var, var, share))


def _statistics(norm: BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    return norm.running_mean, norm.running_var, norm.num_batches_tracked
