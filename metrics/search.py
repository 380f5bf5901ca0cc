"""Exact search by cosine, block by block: the memory is that of a block, whatever the number of rows.

Shapes: Q queries, N rows, E embedding dimension, k hits of a query.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .finite import non_finite_last


class Hits(NamedTuple):
    """The rows with the highest scores, best first; of equal scores the lower row.

    Attributes:
        row: long [Q, k].
        score: float32 [Q, k].
    """

    row: Tensor
    score: Tensor


def exact_search(blocks: Iterable[tuple[Tensor, Tensor]], count: int) -> Hits:
    """Return the rows with the highest scores; non-finite scores are minus infinity, and the last.

    Args:
        blocks: numbers of rows, long [n], ascending over all blocks, and the scores of the queries with them [Q, n].
        count: number k of hits; all rows if there are fewer.
    """
    hits: Hits | None = None
    for numbers, scores in blocks:
        # Only the best of a block can be among the best of all.
        best = _first(Hits(numbers.expand(len(scores), -1), non_finite_last(scores)), count)
        both = (
            best if hits is None else Hits(torch.cat([hits.row, best.row], 1), torch.cat([hits.score, best.score], 1))
        )
        hits = _first(both, count)
    return Hits(torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0)) if hits is None else hits


def _first(hits: Hits, count: int) -> Hits:
    """Return the best of some hits, whose order is that of the rows where scores are equal."""
    if hits.score.shape[1] > 4 * count:  # a stable sort of all would take most of the time
        least = hits.score.topk(count, dim=1).values[:, -1:]
        several = int((hits.score >= least).sum(1).max())  # more than `count` where scores are equal
        columns = (hits.score >= least).int().topk(several, dim=1).indices.sort(dim=1).values
        hits = Hits(hits.row.gather(1, columns), hits.score.gather(1, columns))
    order = hits.score.argsort(dim=1, descending=True, stable=True)[:, :count]
    return Hits(hits.row.gather(1, order), hits.score.gather(1, order))


def search_recall(hits: Hits, exact: Hits) -> float:
    """Return the share of the exact hits that a search has among its own, from 0 to 1."""
    same = (exact.row[:, :, None] == hits.row[:, None, :]).any(2)
    return float(same.double().mean())
