"""Memory format of convolution weights and of the optimizer state that belongs to them."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def channels_last(module: nn.Module) -> None:
    """Convert convolution weights to channels-last, which is several times as fast on a CPU.

    Convolutions of three input channels keep their format, and so do the images: torch 2.15 writes out of bounds in the
    backward pass of a 1x1 convolution with stride 2 and three channels in channels-last format (oneDNN), which the stem
    of MCi contains.
    """
    module.to(memory_format=torch.channels_last)
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3:
            part.to(memory_format=torch.contiguous_format)


def lay_out_moments(optimizer: Optimizer) -> None:
    """Convert moments to the memory format of their weights, now and after each load of a state dict.

    A sharded checkpoint holds contiguous moments, and torch 2.15 keeps that format when it loads them. A fused
    optimizer pairs weights and moments by their position in memory, which differs for channels-last weights.
    """
    optimizer.register_load_state_dict_post_hook(_lay_out_moments)
    _lay_out_moments(optimizer)


def _lay_out_moments(optimizer: Optimizer) -> None:
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)
