"""Exact search in blocks against one sort of all scores."""

import pytest
import torch

from vlightning.metrics.search import Hits, exact_search, search_recall


def blocks(scores, size):
    numbers = torch.arange(scores.shape[1]).split(size)
    return zip(numbers, scores.split(size, dim=1), strict=True)


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_hits_are_the_first_of_a_stable_sort_of_all(size, count):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-2, 3, (257, 3), generator=generator).float()  # many equal scores
    queries = torch.randint(-2, 3, (6, 3), generator=generator).float()
    scores = queries @ rows.T
    hits = exact_search(blocks(scores, size), count)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    assert torch.equal(hits.row, order)
    assert torch.equal(hits.score, scores.gather(1, order))


def test_rows_that_are_not_finite_come_last():
    hits = exact_search(blocks(torch.tensor([[torch.nan, 0.5, torch.inf, 1.0]]), 2), 4)
    assert hits.row.tolist() == [[3, 1, 0, 2]]


def test_recall_is_the_share_of_exact_hits():
    exact = Hits(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.zeros(2, 3))
    assert search_recall(Hits(torch.tensor([[3, 9, 1], [4, 5, 6]]), torch.zeros(2, 3)), exact) == pytest.approx(5 / 6)
