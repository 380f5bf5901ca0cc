"""Losses of a new tower in the space of a trained pair: its features, and their similarities to the other tower's.

Shapes: b rows of this rank, n rows of all ranks, embedding dimension d.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.precision import unit
from .contrast import PairFeatures, contrast_losses

INT8_LEVELS = 127
"""Largest number of an int8 index, which stands for 1."""


class TowerFeatures(NamedTuple):
    """Unit-length features of the same rows by three towers, of this rank and of all ranks."""

    new: Tensor  # [b, d] of the new tower, with gradient
    old: Tensor  # [b, d] of the tower that it replaces
    partner: Tensor  # [b, d] of the tower that both are compared with
    all_new: Tensor  # [n, d]
    all_old: Tensor  # [n, d]
    all_partner: Tensor  # [n, d]
    scale: Tensor | float  # logit scale of the trained pair


class NewTowerLosses(NamedTuple):
    """Losses of a batch, each a mean over the rows of this rank and over the prefixes, 0-D."""

    feature: Tensor  # 1 - cosine of the new and the old feature
    similarity: Tensor  # KL(old || new) of the similarities to the partner, mean of both directions
    contrast: Tensor  # cross entropy with the partners of the rows; 0 if it is not asked for


def new_tower_losses(
    features: TowerFeatures,
    prefixes: Sequence[int] = (),
    int8: bool = False,
    offset: int = 0,
    chunk: int | None = None,
    contrast: bool = False,
    ids: tuple[Tensor, Tensor] | None = None,
) -> NewTowerLosses:
    """Compute the losses of a new tower, of its whole features and of their prefixes (Matryoshka, arXiv 2205.13147).

    The soft targets are always the similarities of whole features: a prefix shall rank as the whole does. They are the
    divergence of `contrast_losses`, with the old tower as the teacher of the new one.

    Args:
        features: features of the three towers.
        prefixes: lengths of the prefixes, beside the whole features; each prefix is scaled to unit length.
        int8: whether the similarities are those of features as an int8 index stores them (`as_int8`).
        offset: row of all ranks that is the first of this rank.
        chunk: as in `contrast_losses`.
        contrast: whether to compute the contrast.
        ids: as in `contrast_losses`, for the contrast.
    """
    teacher = PairFeatures(features.old, features.partner, features.all_old, features.all_partner, features.scale)
    by_prefix = []
    for length in (features.new.shape[1], *prefixes):
        new, all_new, old, partner, all_partner = (
            unit(whole[:, :length])
            for whole in (features.new, features.all_new, features.old, features.partner, features.all_partner)
        )
        feature = (1 - (new * old).sum(1)).mean()
        if int8:
            new, all_new, partner, all_partner = (as_int8(whole) for whole in (new, all_new, partner, all_partner))
        student = PairFeatures(new, partner, all_new, all_partner, features.scale)
        similarity = contrast_losses(student, [teacher], offset, chunk).distillation
        contrasted = feature.new_zeros(())
        if contrast:
            contrasted = contrast_losses(student, [], offset, chunk, ids).contrast
        by_prefix.append((feature, similarity, contrasted))
    return NewTowerLosses(*(torch.stack(losses).mean() for losses in zip(*by_prefix, strict=True)))


def as_int8(features: Tensor) -> Tensor:
    """Return features [N, d] as a search in an int8 index sees them: in steps of 1/127, and of unit length again.

    The gradient is that without rounding (straight-through, arXiv 1308.3432).

    Args:
        features: of unit length.
    """
    rounded = (features * INT8_LEVELS).round() / INT8_LEVELS
    return unit(features + (rounded - features).detach())
