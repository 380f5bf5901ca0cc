"""What is infinite or not a number ranks last, and is named."""

import pytest
import torch

from vlightning.metrics.finite import hits, non_finite_last, some_of

BROKEN = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_comes_after_the_lowest_number(dtype):
    scores = torch.tensor([*BROKEN, -1e4, 3.0], dtype=dtype)
    assert non_finite_last(scores).tolist() == [-torch.inf] * 3 + [scores[3].item(), 3.0]


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("classes", [3, 7])
def test_a_class_without_a_finite_score_is_nowhere(value, classes):
    scores = torch.arange(classes).expand(classes, -1).float()
    label = torch.arange(classes)
    expected = torch.zeros(classes, min(5, classes), dtype=torch.bool)
    for row in range(classes):
        if (place := classes - 1 - row) < 5:
            expected[row, place] = True
    assert torch.equal(hits(scores, label, 5), expected)
    assert not hits(torch.full_like(scores, value), label, 5).any()
    assert not hits(scores, label - classes, 5).any()
    # One class of all rows: its own image misses it, and those below it move up by a place.
    broken = scores.index_fill(1, torch.tensor(classes - 1), value)
    found = hits(broken, label, 5)
    assert not found[-1].any()
    assert found[:-1, 0].tolist() == (label[:-1] == classes - 2).tolist()


def test_the_first_are_named_and_the_others_counted():
    assert some_of(torch.tensor([4, 2])) == "4, 2"
    assert some_of(torch.arange(20)) == f"{', '.join(map(str, range(16)))} and 4 more"
    assert some_of(torch.zeros(0)) == "unknown"
