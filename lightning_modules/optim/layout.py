"""How the weights of convolutions, and what an optimizer keeps for them, lie in memory."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def channels_last(module: nn.Module) -> None:
    """Lay out convolutions with channels last, in which they run several times as fast on a CPU; values stay.

    Not those of the images, which therefore come in as they are: torch 2.15 writes beyond its memory in the backward
    pass of a 1x1 convolution with stride 2 of three channels in that layout (oneDNN), and MCi's stem has one.
    """
    module.to(memory_format=torch.channels_last)
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3:
            part.to(memory_format=torch.contiguous_format)


def lay_out_moments(optimizer: Optimizer) -> None:
    """Lay out moments as their weights are, now and whenever a state is loaded; values stay.

    A sharded checkpoint holds contiguous moments, whatever the weights of the process that loads it, and torch 2.15
    loads them as they lie. A fused optimizer then pairs numbers by their order in memory: those of a convolution with
    channels last with the moments of others.
    """
    optimizer.register_load_state_dict_post_hook(_lay_out_moments)
    _lay_out_moments(optimizer)


def _lay_out_moments(optimizer: Optimizer) -> None:
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)
