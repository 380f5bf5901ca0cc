"""The pairwise sigmoid loss of SigLIP (Zhai et al., arXiv 2303.15343).

Shapes: b rows of this rank, n columns of all ranks, embedding dimension d.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.precision import at_least_float32
from .contrast import PairFeatures, same_pairs


def sigmoid_loss(
    student: PairFeatures,
    bias: Tensor,
    offset: int = 0,
    chunk: int | None = None,
    ids: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute -1/b sum_ij log sigmoid(z_ij (t x_i y_j + bias)), z_ij being 1 for pairs and -1 for all others (eq. 1).

    Rows are the images of this rank, columns the texts of all ranks. With gathered columns and gradients averaged over
    ranks, N ranks with b pairs each give the result of one rank with N b pairs.

    Args:
        student: unit-length features and the factor t of their cosines.
        bias: bias of the logits, of one element.
        offset: column of the first pair of this rank.
        chunk: number of rows whose logits are held at a time and computed again in the backward pass; None holds all.
        ids: ids of `pair_ids`; other pairs that share one are left out of the sum.

    Returns:
        0-D, in float32 at least.
    """
    rows = at_least_float32(student.image)
    columns = at_least_float32(student.all_text)
    size = chunk or len(rows)
    sums = []
    for start in range(0, len(rows), size):
        inputs = (
            rows[start : start + size],
            columns,
            student.scale,
            bias,
            None if ids is None else ids[0][start : start + size],
            None if ids is None else ids[1],
            offset + start,
        )
        sums.append(_sum(*inputs) if chunk is None else checkpoint(_sum, *inputs, use_reentrant=False))
    return torch.stack(sums).sum() / len(rows)


def _sum(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    bias: Tensor,
    row_id: Tensor | None,
    column_id: Tensor | None,
    offset: int,
) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        logits = scale * rows @ columns.T + bias
        pairs = torch.arange(len(rows), device=rows.device)
        signs = torch.full_like(logits, -1.0)
        signs[pairs, pairs + offset] = 1.0
        log_likelihoods = F.logsigmoid(signs * logits)
        if row_id is not None and column_id is not None:
            log_likelihoods = log_likelihoods.masked_fill(same_pairs(row_id, column_id, offset), 0.0)
        return -log_likelihoods.sum()
