"""Non-finite scores and features: they rank last, and a message names their samples."""

from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = -1
"""Index of the highest score where no score is finite."""


class Highest(NamedTuple):
    """The highest scores [..., K], best first, and their indices, long [..., K]."""

    values: Tensor
    indices: Tensor


def non_finite_last(scores: Tensor) -> Tensor:
    """Replace each non-finite score by minus infinity.

    Every ranking by scores goes through this function: torch sorts NaN before all numbers, and every comparison with
    NaN is false, so that a model with non-finite scores would have perfect ranks.
    """
    return scores.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def highest(scores: Tensor, count: int) -> Highest:
    """Return the highest scores along the last dimension; non-finite ones are minus infinity, and the last.

    Args:
        scores: Scores [..., C].
        count: Number K of scores; all if there are fewer.
    """
    return Highest(*non_finite_last(scores).topk(min(count, scores.shape[-1])))


def best(scores: Tensor) -> Tensor:
    """Return the index of the highest score along the last dimension, long [...]; `NOTHING` if no score is finite.

    Args:
        scores: Scores [..., C], of at least one candidate.
    """
    value, index = non_finite_last(scores).max(-1)
    return index.masked_fill(value == -torch.inf, NOTHING)


def some_of(numbers: Tensor, count: int = 16) -> str:
    """Return the first of some numbers [N], separated by commas, and how many more there are; "unknown" for none."""
    named = ", ".join(str(number) for number in numbers[:count].tolist()) or "unknown"
    return named + (f" and {len(numbers) - count} more" if len(numbers) > count else "")
