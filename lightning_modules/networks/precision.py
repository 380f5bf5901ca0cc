"""Precision of what losses are computed from."""

import torch
import torch.nn.functional as F
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Cast half-precision tensors to float32 and leave float32 and float64 as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def unit(features: Tensor) -> Tensor:
    """Features [..., E] at unit length, in float32 at least."""
    return F.normalize(at_least_float32(features), dim=-1)
