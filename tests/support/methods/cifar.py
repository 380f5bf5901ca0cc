"""The weights that the golden outputs of the CIFAR networks were computed with."""

import math
import zlib

import torch


def fill_cifar(key, shape):
    """The tensor of one entry of a state dict: a function of its key and shape alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    if key.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.long)
    if key.endswith("running_var"):
        return 1 + 0.3 * torch.rand(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    if key.endswith(("running_mean", "bias")):
        return 0.05 * noise
    return noise / math.prod(shape[1:]) ** 0.5 if len(shape) > 1 else 1 + 0.1 * noise


def fill(network):
    """Give a network these weights."""
    network.load_state_dict({key: fill_cifar(key, value.shape) for key, value in network.state_dict().items()})
    return network
