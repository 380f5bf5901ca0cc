"""Scores and features that are infinite or not a number: they rank last, and a message names whose they are."""

import torch
from torch import Tensor

_NAMED = 16  # rows in a message


def non_finite_last(scores: Tensor) -> Tensor:
    """The scores, with the lowest there is, minus infinity, in place of each that is infinite or not a number.

    Every order by scores goes through this: torch sorts what is not a number before all numbers, and a comparison with
    it is false, so that a broken model would have nothing ranked before its right answers.
    """
    return scores.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def hits(scores: Tensor, label: Tensor, places: int) -> Tensor:
    """Whether the right class is at each of the first places; never where its score is not finite.

    Args:
        scores: [B, C] of the classes.
        label: long [B], the right class; one outside 0 to C - 1 is nowhere.
        places: K, how many; C where there are fewer classes.

    Returns:
        Boolean [B, K].
    """
    best = non_finite_last(scores).topk(min(places, scores.shape[1]))
    return (best.indices == label[:, None]) & best.values.isfinite()


def some_of(numbers: Tensor) -> str:
    """The first of some numbers [N], separated by commas, and how many more there are; "unknown" for none."""
    named = ", ".join(str(number) for number in numbers[:_NAMED].tolist()) or "unknown"
    return named + (f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else "")
