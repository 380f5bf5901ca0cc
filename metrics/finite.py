"""Non-finite scores and features: they rank last, and a message names their samples."""

import torch
from torch import Tensor

_NAMED = 16  # rows in a message


def non_finite_last(scores: Tensor) -> Tensor:
    """Replace each non-finite score by minus infinity.

    Every ranking by scores goes through this function: torch sorts NaN before all numbers, and every comparison with
    NaN is false, so that nothing would rank before the right answers of a broken model.
    """
    return scores.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def some_of(numbers: Tensor) -> str:
    """Return the first of some numbers [N], separated by commas, and how many more there are; "unknown" for none."""
    named = ", ".join(str(number) for number in numbers[:_NAMED].tolist()) or "unknown"
    return named + (f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else "")
