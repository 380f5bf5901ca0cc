"""Contrastive loss over pairs, and distillation of the similarities of teachers (MobileCLIP, MM-LG).

Shapes: b rows of this rank, n columns of all ranks, embedding dimension d, K teachers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...callbacks import gather
from ..core.precision import at_least_float32


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


def pair_ids(batch: Mapping[str, Tensor], same_image: bool, same_text: bool) -> tuple[Tensor, Tensor] | None:
    """Return ids [b, k] of the pairs of this rank and [n, k] of all ranks; None if there are none.

    Two pairs that share an id in any column are no negatives of each other. Every rank must call it: it gathers.

    Args:
        batch: a batch, perhaps with `image_id`, long [b].
        same_image: whether pairs of the same image share an id.
        same_text: whether pairs of the same text share an id.
    """
    columns = [batch["image_id"]] if same_image and "image_id" in batch else []
    if same_text:
        ids = batch["input_ids"]  # without a mask all texts have the same length, padding included
        columns.append(text_ids(ids, batch.get("attention_mask", torch.ones_like(ids))))
    if not columns:
        return None
    own = torch.stack(columns, 1)
    return own, gather(own)


def text_ids(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return an id of each text, long [b]: a polynomial hash of its tokens modulo 2^64, whatever its padding.

    Two texts have the same id if their tokens are the same, and else with a probability of about 2^-64.

    Args:
        input_ids: long [b, L].
        attention_mask: [b, L].
    """
    places = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    factors = (places * _FACTOR) ^ (places * _FACTOR >> 29)  # integers of torch wrap around
    factors = factors * _FACTOR
    mixed = (input_ids + 1) * factors
    return ((mixed ^ (mixed >> 31)) * _FACTOR * attention_mask.long()).sum(1)


def share_of_repeats(ids: Tensor) -> Tensor:
    """Return the share of entries [n] that repeat an entry before them, 0-D: 1 - distinct / n."""
    ordered = ids.sort().values
    return (ordered[1:] == ordered[:-1]).sum() / len(ids)


_FACTOR = -7046029254386353131
"""2^64 over the golden ratio, odd, as a signed integer (Fibonacci hashing)."""


def contrast_terms(
    student: Side,
    teachers: Sequence[Side],
    first: int = 0,
    chunk: int | None = None,
    ids: tuple[Tensor, Tensor] | None = None,
) -> Terms:
    """Compute the contrastive and the distillation loss of one batch of pairs.

    With gathered columns and gradients averaged over ranks, N ranks with b pairs each give the result of one rank with
    N b pairs. Softmaxes are computed in float32 at least.

    Args:
        student: embeddings of the student, with gradient.
        teachers: embeddings of the teachers, without gradient; dimensions and scales may differ.
        first: column of the first pair of this rank.
        chunk: number of rows whose logits are held at a time and computed again in the backward pass; None holds all.
        ids: ids of `pair_ids`, long [b, k] and [n, k]. If given, pairs that share an id are no negatives: their columns
            are masked.

    Raises:
        ValueError: If `ids` are given together with teachers, whose targets include those pairs.
    """
    if ids is not None and teachers:
        raise ValueError(
            "Expected no ids with teachers, whose targets include pairs of the same image, got both: leave one out."
        )
    columns = ids or (None, None)
    directions = [
        _direction(
            student.image, student.all_text, student.scale, [(t.image, t.all_text, t.scale) for t in teachers], *columns
        ),
        _direction(
            student.text, student.all_image, student.scale, [(t.text, t.all_image, t.scale) for t in teachers], *columns
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
            same = same_pairs(direction.row_id, direction.column_id, first)
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


def same_pairs(row_id: Tensor, column_id: Tensor, first: int) -> Tensor:
    """Return which columns are other pairs of the image or the text of a row, boolean [b, n].

    Args:
        row_id: long [b, k].
        column_id: long [n, k].
        first: column of the first row's own pair.
    """
    same = share_an_id(row_id, column_id)
    own = torch.arange(len(row_id), device=row_id.device)
    same[own, own + first] = False
    return same


def share_an_id(row_id: Tensor, column_id: Tensor) -> Tensor:
    """Return which columns share an id with which row, boolean [b, n].

    Args:
        row_id: long [b], or [b, k] with several ids.
        column_id: long [n] or [n, k].
    """
    rows, columns = row_id.reshape(len(row_id), -1), column_id.reshape(len(column_id), -1)
    same = rows[:, 0, None] == columns[:, 0]
    for own, other in zip(rows.T[1:], columns.T[1:], strict=True):
        same |= own[:, None] == other
    return same
