"""Precision of what losses are computed from."""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Cast half-precision tensors to float32 and leave float32 and float64 as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
