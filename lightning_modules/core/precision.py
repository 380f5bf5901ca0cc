"""Precision of features and logits that losses are computed from."""

import torch
import torch.nn.functional as F
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Cast half-precision tensors to float32; return float32 and float64 unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def unit(features: Tensor) -> Tensor:
    """Scale features [..., E] to unit length, in float32 at least."""
    return F.normalize(at_least_float32(features), dim=-1)
