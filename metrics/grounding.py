"""Grounding of a text in an image: scores of boxes under a map, and their overlap with the right box.

A box is (x, y, width, height) in pixels, from the upper left corner of the image, as in COCO's annotations.

Shapes: K boxes, g cells along a side of a map.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .finite import best

NO_BOX = -1
"""Index of the chosen box where no box has a positive score."""


def box_iou(boxes: Tensor, box: Tensor) -> Tensor:
    """Return the intersection over union of boxes [K, 4] with a box [4]: [K].

    The authors of ALBEF count whole pixels, from x to x + width - 1, and add 1 to the difference of the ends: the same
    sides, and so the same values wherever the overlap is wider and higher than one pixel.
    """
    first = torch.maximum(boxes[:, :2], box[:2])
    last = torch.minimum(boxes[:, :2] + boxes[:, 2:], box[:2] + box[2:])
    common = (last - first).clamp(min=0).prod(1)
    return common / (boxes[:, 2:].prod(1) + box[2:].prod() - common)


def box_scores(heat: Tensor, size: tuple[int, int], boxes: Tensor) -> Tensor:
    """Return the sum of a map in each box over the square root of the box's area, as the authors of ALBEF.

    The map is resized to the image by bicubic interpolation, without antialiasing; a box contains the pixels from
    floor(x) to floor(x + width) - 1, of those in the image.

    Args:
        heat: [g, g].
        size: height and width of the image in pixels.
        boxes: [K, 4].

    Returns:
        float64 [K].
    """
    height, width = size
    resized = F.interpolate(heat[None, None].double(), size=size, mode="bicubic", align_corners=False)[0, 0]
    sums = F.pad(resized.cumsum(0).cumsum(1), (1, 0, 1, 0))  # [height + 1, width + 1]: of all pixels above and left
    boxes = boxes.double()
    left, top = boxes[:, :2].floor().long().clamp(min=0).unbind(1)
    right, bottom = (boxes[:, :2] + boxes[:, 2:]).floor().long().unbind(1)
    left = left.clamp(max=width)
    right = right.clamp(0, width)
    top = top.clamp(max=height)
    bottom = bottom.clamp(0, height)
    inside = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return inside / boxes[:, 2:].prod(1).sqrt()


def choose_box(scores: Tensor) -> int:
    """Return the index of the highest score [K], the first of several; `NO_BOX` if none is above 0.

    Without a positive score the map says nothing about any box, so none is chosen, and the text counts as wrongly
    grounded. (The authors' code then repeats the box of the text before.)
    """
    chosen = int(best(scores))
    return chosen if float(scores[chosen]) > 0 else NO_BOX
