"""Non-finite scores and features: they rank last, and a message names their samples."""

import torch
from torch import Tensor


def non_finite_last(scores: Tensor) -> Tensor:
    """Replace each non-finite score by minus infinity.

    Every ranking by scores goes through this function: torch sorts NaN before all numbers, and every comparison with
    NaN is false, so that a model with non-finite scores would have perfect ranks.
    """
    return scores.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def some_of(numbers: Tensor, count: int = 16) -> str:
    """Return the first of some numbers [N], separated by commas, and how many more there are; "unknown" for none."""
    named = ", ".join(str(number) for number in numbers[:count].tolist()) or "unknown"
    return named + (f" and {len(numbers) - count} more" if len(numbers) > count else "")
