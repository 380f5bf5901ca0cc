"""Rows that an evaluation reads: an even draw of a split, and a check of their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...common.errors import UserError
from .sampling import evaluation_batches

LEAST = 8
"""Number of evaluated labels below which their shares say nothing."""


def check_limit(limit: int | float | None) -> None:
    """Check `limit_eval_rows`.

    Raises:
        UserError: If it is neither a number of rows nor a share.
    """
    if limit is None or (isinstance(limit, int) and limit >= 1) or (isinstance(limit, float) and 0 < limit <= 1):
        return
    raise UserError(
        f"Expected data.limit_eval_rows of at least 1 row, or a share above 0.0 and up to 1.0, got {limit}: correct it."
    )


def drawn_evenly(length: int, limit: int | float | None, labels: Sequence[int] | None) -> np.ndarray:
    """Return the items that an evaluation reads, always the same: evenly spaced, of each label in proportion.

    Args:
        length: number of items of the split.
        limit: number of items, or their share if it is a float; None for all.
        labels: label of each item; None without labels.

    Returns:
        Indices in ascending order, int64 [n].
    """
    count = math.ceil(limit * length) if isinstance(limit, float) else limit
    if count is None or count >= length:
        return np.arange(length)
    order = np.arange(length) if labels is None else np.argsort(labels, kind="stable")
    return np.sort(order[(2 * np.arange(count) + 1) * length // (2 * count)])


def evaluated_items(length: int, batch_size: int, processes: int, limit_batches: Any) -> np.ndarray:
    """Return the items that all processes read under the Trainer's limit of batches of a process, a number or share.

    Returns:
        Indices, int64 [n].
    """
    items: list[int] = []
    for rank in range(processes):
        batches = evaluation_batches(length, batch_size, rank, processes)
        count = int(len(batches) * limit_batches) if isinstance(limit_batches, float) else limit_batches
        items += (item for batch in batches[:count] for item in batch)
    return np.array(items, np.int64)


def remark_on_labels(
    labels: np.ndarray, items: np.ndarray, split: str, names: Sequence[str] | None, option: str
) -> str | None:
    """Return a warning if the labels of the items that are read are all equal, or far from the labels of the split.

    Args:
        labels: labels of the split, -1 where there is none, int64 [N].
        items: the items that are read, int64 [n].
        split: name of the split.
        names: names of the labels 0, 1, ..., if there are any.
        option: option of the Trainer that limits the items.
    """
    read = labels[items]
    read = read[read >= 0]
    labels = labels[labels >= 0]
    if len(read) < LEAST:
        return None
    furthest = furthest_label(labels, read)
    if furthest is None:
        return None
    name = repr(names[furthest]) if names else f"{furthest}"
    before = (labels == furthest).mean()
    after = (read == furthest).mean()
    if before == 1:
        return f"All {len(labels)} labels of the {split} split are {name}: accuracies say little; check data.{split}."
    return (
        f"The {split} reads {len(read)} labels, of which {after:.0%} are {name}, and {before:.0%} in the whole split: "
        f"replace {option} by data.limit_eval_rows, which draws evenly."
    )


def furthest_label(labels: np.ndarray, read: np.ndarray) -> int | None:
    """Return the label whose share is furthest from that of the split, if the labels that are read are no even draw.

    They are none if all are equal, or if Pearson's chi-squared statistic exceeds its mean in random draws by more than
    six standard deviations and by n / 10.

    Args:
        labels: labels of the split, int64 [N].
        read: labels that are read, int64 [n].
    """
    count = len(read)
    classes, counts = np.unique(labels, return_counts=True)
    shares = counts / len(labels)
    read_counts = np.bincount(np.searchsorted(classes, read), minlength=len(classes))
    furthest = int(classes[np.abs(read_counts / count - shares).argmax()])
    if read_counts.max() == count and (len(classes) == 1 or (shares**count).sum() < 0.01):
        return int(read[0])
    expected = count * shares
    degrees = len(classes) - 1
    excess = ((read_counts - expected) ** 2 / expected).sum() - degrees
    variance = 2 * degrees + ((1 / shares).sum() - len(classes) ** 2 - 2 * len(classes) + 2) / count
    return furthest if excess > max(6 * math.sqrt(variance), count / 10) else None
