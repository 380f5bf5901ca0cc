"""Non-finite scores rank last, and a message names their samples."""

import pytest
import torch

from vlightning.metrics.finite import non_finite_last, some_of

BROKEN = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_scores_come_after_the_lowest_number(dtype):
    scores = torch.tensor([*BROKEN, -1e4, 3.0], dtype=dtype)
    assert non_finite_last(scores).tolist() == [-torch.inf] * 3 + [scores[3].item(), 3.0]


def test_the_first_are_named_and_the_others_counted():
    assert some_of(torch.tensor([4, 2])) == "4, 2"
    assert some_of(torch.arange(20)) == f"{', '.join(map(str, range(16)))} and 4 more"
    assert some_of(torch.zeros(0)) == "unknown"
