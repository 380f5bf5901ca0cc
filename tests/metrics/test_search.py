"""Exact search in blocks against one sort of all scores."""

import pytest
import torch

from vlightning.metrics.search import Hits, exact_search, search_recall


def blocks(rows, size):
    return (
        (torch.arange(len(rows))[start : start + size], rows[start : start + size])
        for start in range(0, len(rows), size)
    )


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_hits_are_the_first_of_a_stable_sort_of_all(size, count):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-2, 3, (257, 3), generator=generator).float()  # many equal scores
    queries = torch.randint(-2, 3, (6, 3), generator=generator).float()
    hits = exact_search(queries, blocks(rows, size), count)
    scores = queries @ rows.T
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    assert torch.equal(hits.row, order)
    assert torch.equal(hits.score, scores.gather(1, order))


def test_rows_that_are_not_finite_come_last():
    rows = torch.tensor([[1.0, torch.nan], [0.5, 0.0], [torch.inf, 0.0], [1.0, 0.0]])
    hits = exact_search(torch.tensor([[1.0, 0.0]]), blocks(rows, 2), 4)
    assert hits.row.tolist() == [[3, 1, 0, 2]]


def test_recall_is_the_share_of_exact_hits():
    exact = Hits(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.zeros(2, 3))
    assert search_recall(Hits(torch.tensor([[3, 9, 1], [4, 5, 6]]), torch.zeros(2, 3)), exact) == pytest.approx(5 / 6)
