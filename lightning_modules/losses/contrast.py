"""Contrast of image-text pairs: features of the pairs of all ranks, the contrastive loss, and distillation of teachers.

Shapes: b pairs of this rank, which are rows; n pairs of all ranks, which are columns; embedding dimension d; L tokens;
K teachers.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...callbacks import gather
from ...common.clip_vocabulary import CLIP_VOCABULARY
from ...common.errors import UserError
from ..core.memory import in_slices, kept_statistics, one_update
from ..core.precision import at_least_float32, unit
from ..core.towers import projected


class PairFeatures(NamedTuple):
    """Unit-length features of pairs by one network: of the pairs of this rank, and of all ranks."""

    image: Tensor  # [b, d]
    text: Tensor  # [b, d]
    all_image: Tensor  # [n, d]
    all_text: Tensor  # [n, d]
    scale: Tensor | float  # logit scale, 1 / temperature


class ContrastLosses(NamedTuple):
    """Losses of one batch of pairs, each a mean over the rows of this rank and both directions, 0-D."""

    contrast: Tensor  # cross entropy with the pairs
    distillation: Tensor  # mean over the teachers of KL(teacher || student); 0 without teachers
    entropy: Tensor  # of the teachers; entropy + distillation is the cross entropy of student and teacher


def student_features(
    student: Any, image: Tensor, captions: Mapping[str, Tensor], micro_batch_size: int | None
) -> dict[str, PairFeatures]:
    """Return the student's features of pairs, by kind of caption, with gradients also across ranks.

    Args:
        student: an open_clip model with a `logit_scale`.
        image: images [b, 3, S, S], or features [b, w] by a locked tower, which then does not run (`locked_features`).
        captions: token ids [b, L] by kind of caption, or features [b, w] likewise.
        micro_batch_size: number of pairs that go through the towers at a time; None means all.
    """

    def encode(image: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
        # All captions share one pass through the text tower.
        joined = _joined(texts, student)
        text = projected(student.text, joined) if joined.is_floating_point() else student.encode_text(joined)
        images = projected(student.visual, image) if image.ndim == 2 else student.encode_image(image)
        return tuple(unit(feature) for feature in (images, *text.chunk(len(texts))))

    one_step: AbstractContextManager[None] = nullcontext() if micro_batch_size is None else one_update(student)
    with one_step:
        features = in_slices(
            encode, micro_batch_size, image, *captions.values(), again=lambda: kept_statistics(student)
        )
    gathered = gather(torch.cat(features, 1), True).chunk(len(features), 1)
    image_feature, *text_features = features
    all_image_features, *all_text_features = gathered
    scale = student.logit_scale.exp()
    return {
        kind: PairFeatures(image_feature, text_feature, all_image_features, all_text, scale)
        for kind, text_feature, all_text in zip(captions, text_features, all_text_features, strict=True)
    }


def _joined(texts: Sequence[Tensor], student: Any) -> Tensor:
    """Return texts of several lengths, token ids [b, L], in one batch, padded to the longest."""
    longest = max(text.shape[1] for text in texts)
    if all(text.shape[1] == longest for text in texts):
        return torch.cat(list(texts))
    padding = student.text.pad_token_id
    return torch.cat([F.pad(text, (0, longest - text.shape[1]), value=padding) for text in texts])


def check_length(input_ids: Tensor, max_tokens: int, fixed: bool = True) -> None:
    """Check the number of tokens of a text, which open_clip's text towers cannot vary.

    Args:
        input_ids: long [b, L].
        max_tokens: number of tokens.
        fixed: whether the text tower takes this number only, and not fewer.

    Raises:
        UserError: If it differs.
    """
    if not fixed:
        if input_ids.shape[1] > max_tokens:
            raise UserError(
                f"Expected texts of at most {max_tokens} tokens, got {input_ids.shape[1]}: give data and module the "
                "same max_tokens."
            )
        return
    if input_ids.shape[1] != max_tokens:
        raise UserError(
            f"Expected captions of {max_tokens} tokens, got {input_ids.shape[1]}: give the data tokenizer clip, "
            f"vocab_size {CLIP_VOCABULARY} and max_tokens {max_tokens}."
        )


def pair_ids(batch: Mapping[str, Tensor], same_image: bool, same_text: bool) -> tuple[Tensor, Tensor] | None:
    """Return ids [b, k] of the pairs of this rank and [n, k] of all ranks; None if there are none.

    Two pairs that share an id in any column are not negatives of each other. Every rank must call it, since it gathers.

    Args:
        batch: a batch, perhaps with `image_id`, long [b].
        same_image: whether pairs of the same image share an id.
        same_text: whether pairs of the same text share an id.
    """
    columns = [batch["image_id"]] if same_image and "image_id" in batch else []
    if same_text:
        tokens = batch["input_ids"]  # without a mask all texts have the same length, padding included
        columns.append(text_ids(tokens, batch.get("attention_mask", torch.ones_like(tokens))))
    if not columns:
        return None
    ids = torch.stack(columns, 1)
    return ids, gather(ids)


def text_ids(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return an id of each text, long [b]: a polynomial hash of its tokens modulo 2^64, whatever its padding.

    Two texts have the same id if their tokens are the same, and else with a probability of about 2^-64.

    Args:
        input_ids: long [b, L].
        attention_mask: [b, L].
    """
    positions = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    factors = (positions * _FACTOR) ^ (positions * _FACTOR >> 29)  # integers of torch wrap around
    factors = factors * _FACTOR
    mixed = (input_ids + 1) * factors
    return ((mixed ^ (mixed >> 31)) * _FACTOR * attention_mask.long()).sum(1)


def coarse(features: PairFeatures, components: int) -> PairFeatures:
    """Return pairs whose image features keep their mean and their first principal components.

    Long-CLIP (arXiv 2403.15378, section 3.2) compares these with short texts, which name only the main attributes of an
    image. Mean and components are those of all images of the batch, and have no gradient.

    Args:
        features: features of pairs.
        components: number of principal components; all, if the batch or the dimension has fewer.
    """
    with torch.no_grad(), torch.autocast(features.image.device.type, enabled=False):
        images = at_least_float32(features.all_image)
        mean = images.mean(0)
        centered = images - mean
        directions = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -components:]  # [d, components]

    def kept(image: Tensor) -> Tensor:
        with torch.autocast(image.device.type, enabled=False):
            return mean + (at_least_float32(image) - mean) @ directions @ directions.T

    return features._replace(image=kept(features.image), all_image=kept(features.all_image))


def share_of_repeats(ids: Tensor) -> Tensor:
    """Return the share of entries [n] that repeat an entry before them, 0-D: 1 - distinct / n."""
    ordered = ids.sort().values
    return (ordered[1:] == ordered[:-1]).sum() / len(ids)


_FACTOR = -7046029254386353131
"""2^64 over the golden ratio, odd, as a signed integer (Fibonacci hashing)."""


def contrast_losses(
    student: PairFeatures,
    teachers: Sequence[PairFeatures],
    offset: int = 0,
    chunk: int | None = None,
    ids: tuple[Tensor, Tensor] | None = None,
) -> ContrastLosses:
    """Compute the contrastive and the distillation loss of one batch of pairs.

    With gathered columns and gradients averaged over ranks, N ranks with b pairs each give the result of one rank with
    N b pairs. Softmaxes are computed in float32 at least.

    Args:
        student: features of the student, with gradient.
        teachers: features of the teachers, without gradient; dimensions and scales may differ.
        offset: column of the first pair of this rank.
        chunk: number of rows whose logits are held at a time and computed again in the backward pass; None holds all.
        ids: ids of `pair_ids`, long [b, k] and [n, k]. If given, pairs that share an id are not negatives: their
            columns are masked.

    Raises:
        ValueError: If `ids` are given together with teachers, whose targets include those pairs.
    """
    if ids is not None and teachers:
        raise ValueError(
            "Expected no ids with teachers, whose targets include pairs of the same image, got both: leave one out."
        )
    row_ids, column_ids = ids or (None, None)
    image_to_text = _Direction(
        at_least_float32(student.image),
        at_least_float32(student.all_text),
        student.scale,
        [(at_least_float32(one.image), at_least_float32(one.all_text), one.scale) for one in teachers],
        row_ids,
        column_ids,
    )
    text_to_image = _Direction(
        at_least_float32(student.text),
        at_least_float32(student.all_image),
        student.scale,
        [(at_least_float32(one.text), at_least_float32(one.all_image), one.scale) for one in teachers],
        row_ids,
        column_ids,
    )
    by_direction = [_mean_losses(direction, offset, chunk) for direction in (image_to_text, text_to_image)]
    return ContrastLosses(*(torch.stack(losses).mean() for losses in zip(*by_direction, strict=True)))


class _Direction(NamedTuple):
    """Rows of one modality against columns of the other; a flat tuple, as `checkpoint` requires."""

    row: Tensor
    column: Tensor
    scale: Tensor | float
    teachers: list[tuple[Tensor, Tensor, Tensor | float]]
    row_id: Tensor | None
    column_id: Tensor | None


def _mean_losses(direction: _Direction, offset: int, chunk: int | None) -> list[Tensor]:
    """Return the fields of `ContrastLosses` of one direction."""
    rows = len(direction.row)
    sums = []
    for start in range(0, rows, chunk or rows):
        selected = slice(start, start + (chunk or rows))
        teachers = [(row[selected], column, scale) for row, column, scale in direction.teachers]
        row_id = None if direction.row_id is None else direction.row_id[selected]
        rows_of_chunk = direction._replace(row=direction.row[selected], teachers=teachers, row_id=row_id)
        if chunk is None:
            sums.append(_summed_losses(rows_of_chunk, offset + start))
        else:
            sums.append(checkpoint(_summed_losses, rows_of_chunk, offset + start, use_reentrant=False))
    return [torch.stack(of_chunks).sum() / rows for of_chunks in zip(*sums, strict=True)]


def _summed_losses(direction: _Direction, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(direction.row.device.type, enabled=False):
        logits = direction.scale * direction.row @ direction.column.T
        pairs = torch.arange(len(direction.row), device=direction.row.device)
        if direction.row_id is not None and direction.column_id is not None:
            same = same_pairs(direction.row_id, direction.column_id, offset)
            logits = logits.masked_fill(same, -torch.inf)
        log_student = F.log_softmax(logits, -1)
        contrast = -log_student[pairs, pairs + offset].sum()
        if not direction.teachers:
            return contrast, contrast.new_zeros(()), contrast.new_zeros(())
        with torch.no_grad():
            mean_teacher = torch.zeros_like(log_student)
            negative_entropy = contrast.new_zeros(())
            for row, column, scale in direction.teachers:
                log_teacher = F.log_softmax(scale * row @ column.T, -1)
                teacher = log_teacher.exp()
                negative_entropy = negative_entropy + (teacher * log_teacher).sum() / len(direction.teachers)
                mean_teacher += teacher / len(direction.teachers)
        # Mean of the K divergences: only the cross entropy with their mean has a gradient.
        return contrast, negative_entropy - (mean_teacher * log_student).sum(), -negative_entropy


def same_pairs(row_id: Tensor, column_id: Tensor, offset: int) -> Tensor:
    """Return which columns are other pairs of the image or the text of a row, boolean [b, n].

    Args:
        row_id: long [b, k].
        column_id: long [n, k].
        offset: column of the pair of the first row.
    """
    same = share_an_id(row_id, column_id)
    rows = torch.arange(len(row_id), device=row_id.device)
    same[rows, rows + offset] = False
    return same


def share_an_id(row_id: Tensor, column_id: Tensor) -> Tensor:
    """Return which columns share an id with which row, boolean [b, n].

    Args:
        row_id: long [b], or [b, k] with several ids.
        column_id: long [n] or [n, k].
    """
    rows = row_id.reshape(len(row_id), -1)
    columns = column_id.reshape(len(column_id), -1)
    same = rows[:, 0, None] == columns[:, 0]
    for row, column in zip(rows.T[1:], columns.T[1:], strict=True):
        same |= row[:, None] == column
    return same
