"""PASCAL VOC's average precision of detections, as detectron2 computes it for the test split of 2007.

Boxes are (x0, y0, x1, y1) in pixels.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_iou

Objects = Mapping[str, Tensor]
"""`boxes` [N, 4], `labels` [N]; of a detector also `scores` [N], of annotations `difficult` bool [N]."""


class Precision(NamedTuple):
    """Average precision in percent, mean over the classes."""

    ap: float  # mean over overlaps of 50 to 95 percent
    ap50: float
    ap75: float


def voc_precision(found: Sequence[Objects], truth: Sequence[Objects]) -> Precision:
    """Compute the precision of the detections in each image, given the annotations of each image."""
    classes = sorted({int(label) for objects in truth for label in objects["labels"]})
    by_overlap = [
        sum(average_precision(found, truth, label, percent / 100) for label in classes) / max(len(classes), 1)
        for percent in range(50, 100, 5)
    ]
    return Precision(100 * sum(by_overlap) / 10, 100 * by_overlap[0], 100 * by_overlap[5])


def average_precision(found: Sequence[Objects], truth: Sequence[Objects], label: int, overlap: float) -> float:
    """Compute the average of the precision at 11 recalls, for one class.

    A detection is correct if the annotation with the largest overlap is above the threshold, and no detection with a
    larger score has it. Detections of difficult objects count neither way.
    """
    scores, correct, wanted = [], [], 0
    for detections, annotations in zip(found, truth, strict=True):
        here, there = detections["labels"] == label, annotations["labels"] == label
        order = detections["scores"][here].argsort(descending=True)
        boxes, difficult = annotations["boxes"][there], annotations["difficult"][there]
        wanted += int((~difficult).sum())
        overlaps = box_iou(detections["boxes"][here][order].double(), boxes.double())
        taken: set[int] = set()
        for score, row in zip(detections["scores"][here][order].tolist(), overlaps, strict=True):
            best = int(row.argmax()) if len(row) else -1
            hit = best >= 0 and float(row[best]) > overlap
            if hit and difficult[best]:
                continue
            scores.append(score)
            correct.append(hit and best not in taken)
            taken |= {best} if hit else set()
    if not wanted or not scores:
        return 0.0
    hits = torch.tensor(correct)[torch.tensor(scores).argsort(descending=True, stable=True)].double().cumsum(0)
    recall, precision = hits / wanted, hits / torch.arange(1, len(hits) + 1)
    reached = [precision[recall >= tenth / 10 - 1e-9] for tenth in range(11)]
    return sum(float(part.max()) for part in reached if len(part)) / 11
