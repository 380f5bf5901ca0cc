"""Contrastive loss over pairs, and distillation of the similarities of teachers (MobileCLIP, MM-LG).

Shapes: b rows of this rank, n columns of all ranks, embedding dimension d, K teachers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..callbacks import gather
from .networks.precision import at_least_float32


class Side(NamedTuple):
    """Unit-length embeddings of one network: of the pairs of this rank, and of all ranks."""

    image: Tensor  # [b, d]
    text: Tensor  # [b, d]
    all_image: Tensor  # [n, d]
    all_text: Tensor  # [n, d]
    scale: Tensor | float  # logit scale, 1 / temperature


class Terms(NamedTuple):
    """Means over the rows of this rank and both directions."""

    contrast: Tensor  # cross entropy with the pairs
    distillation: Tensor  # mean over the teachers of KL(teacher || student); 0 without teachers
    entropy: Tensor  # of the teachers; entropy + distillation is the cross entropy of student and teacher


def all_image_ids(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the image ids of the pairs of this rank, long [b], and of all ranks, long [n]; None without ids.

    Every rank must call it: it gathers.
    """
    ids = batch.get("image_id")
    return None if ids is None else (ids, gather(ids))


def contrast_terms(
    student: Side,
    teachers: Sequence[Side],
    first: int = 0,
    chunk: int | None = None,
    image_ids: tuple[Tensor, Tensor] | None = None,
) -> Terms:
    """Compute the contrastive and the distillation loss of one batch of pairs.

    With gathered columns and gradients averaged over ranks, N ranks with b pairs each give the result of one rank with
    N b pairs. Softmaxes are computed in float32 at least.

    Args:
        student: embeddings of the student, with gradient.
        teachers: embeddings of the teachers, without gradient; dimensions and scales may differ.
        first: column of the first pair of this rank.
        chunk: number of rows whose logits are held at a time and computed again in the backward pass; None holds all.
        image_ids: image ids, long [b] and [n]. If given, other pairs of the same image are not negatives: their columns
            are masked.

    Raises:
        ValueError: if `image_ids` are given together with teachers, whose targets include those pairs.
    """
    if image_ids is not None and teachers:
        raise ValueError(
            "Expected no image_ids with teachers, whose targets include pairs of the same image, got both: leave one "
            "out."
        )
    ids = image_ids or (None, None)
    directions = [
        _direction(
            student.image, student.all_text, student.scale, [(t.image, t.all_text, t.scale) for t in teachers], *ids
        ),
        _direction(
            student.text, student.all_image, student.scale, [(t.text, t.all_image, t.scale) for t in teachers], *ids
        ),
    ]
    found = zip(*(_rows(direction, first, chunk) for direction in directions), strict=True)
    return Terms(*(torch.stack(both).mean() for both in found))


class _Direction(NamedTuple):
    """Rows of one modality against columns of the other; a flat tuple, as `checkpoint` requires."""

    row: Tensor
    column: Tensor
    scale: Tensor | float
    teachers: list[tuple[Tensor, Tensor, Tensor | float]]
    row_id: Tensor | None
    column_id: Tensor | None


def _direction(
    row: Tensor,
    column: Tensor,
    scale: Tensor | float,
    teachers: list[tuple[Tensor, Tensor, Tensor | float]],
    row_id: Tensor | None = None,
    column_id: Tensor | None = None,
) -> _Direction:
    wide = [(at_least_float32(row), at_least_float32(column), scale) for row, column, scale in teachers]
    return _Direction(at_least_float32(row), at_least_float32(column), scale, wide, row_id, column_id)


def _rows(direction: _Direction, first: int, chunk: int | None) -> list[Tensor]:
    """Return means over the rows, in the order of `Terms`."""
    rows = len(direction.row)
    sums = []
    for start in range(0, rows, chunk or rows):
        part = slice(start, start + (chunk or rows))
        teachers = [(row[part], column, scale) for row, column, scale in direction.teachers]
        row_id = None if direction.row_id is None else direction.row_id[part]
        piece = direction._replace(row=direction.row[part], teachers=teachers, row_id=row_id)
        if chunk is None:
            sums.append(_sums(piece, first + start))
        else:
            sums.append(checkpoint(_sums, piece, first + start, use_reentrant=False))
    return [torch.stack(parts).sum() / rows for parts in zip(*sums, strict=True)]


def _sums(direction: _Direction, first: int) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(direction.row.device.type, enabled=False):
        logits = direction.scale * direction.row @ direction.column.T
        pairs = torch.arange(len(direction.row), device=direction.row.device)
        if direction.row_id is not None and direction.column_id is not None:
            same = direction.row_id[:, None].eq(direction.column_id)
            same[pairs, pairs + first] = False
            logits = logits.masked_fill(same, -torch.inf)
        log_student = F.log_softmax(logits, -1)
        contrast = -log_student[pairs, pairs + first].sum()
        if not direction.teachers:
            return contrast, contrast.new_zeros(()), contrast.new_zeros(())
        with torch.no_grad():
            mean, negative_entropy = torch.zeros_like(log_student), contrast.new_zeros(())
            for row, column, scale in direction.teachers:
                log_teacher = F.log_softmax(scale * row @ column.T, -1)
                teacher = log_teacher.exp()
                negative_entropy = negative_entropy + (teacher * log_teacher).sum() / len(direction.teachers)
                mean += teacher / len(direction.teachers)
        # Mean of the K divergences: only the cross entropy with their mean has a gradient.
        return contrast, negative_entropy - (mean * log_student).sum(), -negative_entropy
