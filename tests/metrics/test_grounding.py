"""Boxes: overlap, scores under a map, and the choice, against hand-made values and a loop over pixels."""

import math

import pytest
import torch
from torch.nn import functional as F

from vlightning.metrics.grounding import NO_BOX, box_iou, box_scores, choose_box


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([10, 10, 20, 10], 1.0),
        ([20, 10, 20, 10], 100 / 300),  # half of each
        ([10, 10, 10, 10], 0.5),
        ([30, 10, 20, 10], 0.0),  # side by side
        ([0, 0, 100, 100], 200 / 10_000),
        ([12.5, 10, 20, 10], 175 / 225),
    ],
)
def test_overlap_of_hand_made_boxes(other, expected):
    found = box_iou(torch.tensor([other], dtype=torch.float64), torch.tensor([10.0, 10, 20, 10], dtype=torch.float64))
    assert found.item() == pytest.approx(expected)


def test_overlap_equals_a_count_of_whole_pixels():
    """The convention of the annotations: pixels from x to x + width - 1."""
    generator = torch.Generator().manual_seed(0)
    corners, sides = (torch.randint(low, 12, (50, 2), generator=generator) for low in (0, 1))
    boxes = torch.cat([corners, sides], 1)

    def pixels(box):
        x, y, wide, high = box.tolist()
        return {(i, j) for i in range(x, x + wide) for j in range(y, y + high)}

    for box in boxes[:5]:
        expected = [len(pixels(box) & pixels(other)) / len(pixels(box) | pixels(other)) for other in boxes]
        torch.testing.assert_close(box_iou(boxes.double(), box.double()), torch.tensor(expected, dtype=torch.float64))


def test_scores_equal_a_loop_over_the_pixels_of_the_resized_map():
    generator = torch.Generator().manual_seed(0)
    heat = torch.rand(6, 6, generator=generator)
    height, width = 37, 53
    resized = F.interpolate(heat[None, None].double(), size=(height, width), mode="bicubic")[0, 0]
    boxes = torch.tensor([[0, 0, 53, 37], [3.7, 4.2, 10.9, 7.5], [50, 30, 4, 8], [-0.5, 0, 3, 3], [10, 10, 0.5, 0.5]])
    expected = []
    for x, y, wide, high in boxes.tolist():
        total = sum(
            float(resized[row, column])
            for row in range(max(math.floor(y), 0), min(math.floor(y + high), height))
            for column in range(max(math.floor(x), 0), min(math.floor(x + wide), width))
        )
        expected.append(total / math.sqrt(wide * high))
    found = box_scores(heat, (height, width), boxes)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_a_tight_box_has_a_higher_score_than_a_part_or_the_whole():
    heat = torch.zeros(8, 8)
    heat[2:4, 4:6] = 1
    scores = box_scores(heat, (80, 80), torch.tensor([[0.0, 0, 80, 80], [40, 20, 20, 20], [40, 20, 10, 10]]))
    assert choose_box(scores) == 1


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [([0.1, 0.3, 0.2], 1), ([0.0, 0.0], NO_BOX), ([-0.2, -0.1], NO_BOX), ([math.nan, 0.1], 1), ([math.nan], NO_BOX)],
)
def test_the_highest_positive_score_is_chosen_or_none(scores, chosen):
    assert choose_box(torch.tensor(scores)) == chosen
