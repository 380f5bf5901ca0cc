"""Attention transfer (Zagoruyko and Komodakis, arXiv 1612.03928), between the maps of all stages.

Shapes: B images, D channels, H x W positions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.errors import UserError
from ...core.precision import at_least_float32, unit
from ...networks.cifar import Classifier


def check_stages(student: Classifier, teacher: Classifier) -> None:
    """Check that two networks have equally many stages, two at least.

    Raises:
        UserError: If they have not, or their stages are unknown.
    """
    found = len(student.stages), len(teacher.stages)
    if found[0] != found[1] or found[0] < 2:
        raise UserError(
            "Expected equally many stages of student and teacher for kd.attention_weight and kd.hint_weight, got "
            f"{found[0]} and {found[1]}: use CIFAR networks of such a pair, or residual networks of a library."
        )


def attention(maps: Tensor) -> Tensor:
    """Return the mean squared activation over the channels at each position, of unit length: [B, H * W]."""
    return unit(at_least_float32(maps).square().mean(1).flatten(1))


def attention_loss(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Compute the squared difference of attention, mean over images and positions, and sum over the stages.

    The larger of two maps is averaged to the size of the smaller one (CRD benchmark).

    Args:
        student: maps [B, D_i, H_i, W_i].
        teacher: maps [B, E_i, I_i, J_i], without gradient.
    """
    terms = []
    for own, other in zip(student, teacher, strict=True):
        size = min(own.shape[-2], other.shape[-2]), min(own.shape[-1], other.shape[-1])
        one, two = (F.adaptive_avg_pool2d(at_least_float32(maps), size) for maps in (own, other))
        terms.append((attention(one) - attention(two)).square().mean())
    return torch.stack(terms).sum()
