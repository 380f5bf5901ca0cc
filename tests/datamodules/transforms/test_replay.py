"""Augmentations drawn, written as JSON and carried out again."""

import json

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms import functional as vision

from support.data.images import draw_image
from support.methods.reinforced import torchvision_augmentation
from vlightning.datamodules.transforms.replay import (
    OPERATIONS,
    Augmentation,
    AugmentationDraw,
    Box,
    augmentation_entries,
    operate,
    parse_augmentation,
    replay,
)


def noise(height=211, width=300):
    return draw_image(3, (width, height))


@pytest.mark.parametrize("as_string", [False, True])
def test_a_recorded_augmentation_is_torchvisions_pixel_for_pixel(as_string):
    image = noise()
    seen = set()
    for seed in range(60):
        expected = torchvision_augmentation(image, 224, seed)
        torch.manual_seed(seed)
        entries = [AugmentationDraw()(image.height, image.width).as_json()]
        text = json.dumps(entries)
        (entry,) = augmentation_entries(text if as_string else json.loads(text))
        recorded = parse_augmentation(entry)
        seen |= {operation[0] for operation in recorded.operations}
        assert np.array_equal(np.asarray(replay(image, recorded, 224, "bicubic")), np.asarray(expected)), seed
    assert seen == set(range(len(OPERATIONS)))


def test_magnitudes_are_the_released_ones():
    draw = AugmentationDraw()
    expected = {
        "ShearX": 0.09,
        "TranslateX": 30.453172,
        "Rotate": 9.0,
        "Color": 0.27,
        "Posterize": 7,
        "Solarize": 178.5,
    }
    found = {name: draw.magnitudes[OPERATIONS.index(name)] for name in expected}
    assert found == pytest.approx(expected)


def test_operations_are_torchvisions():
    image = noise(64, 80)
    magnitudes = {"TranslateX": -30.45, "TranslateY": 12.9, "Posterize": 3, "Solarize": 100.0}
    for name in OPERATIONS:
        magnitude = magnitudes.get(name, -0.27)
        expected = autoaugment._apply_op(image, name, magnitude, InterpolationMode.NEAREST, None)
        assert np.array_equal(np.asarray(operate(image, name, magnitude)), np.asarray(expected)), name


def test_the_same_box_at_another_resolution():
    image = noise()
    augmentation = Augmentation(Box(10, 20, 150, 200), ((5, 9.0), None))
    cropped = vision.resized_crop(image, 10, 20, 150, 200, [256, 256], InterpolationMode.BILINEAR)
    expected = vision.rotate(cropped, 9.0)
    assert np.array_equal(np.asarray(replay(image, augmentation, 256, "bilinear")), np.asarray(expected))


def test_boxes_follow_the_image_to_another_size():
    assert Box(100, 50, 200, 400).rescaled((400, 800), (200, 400)) == Box(50, 25, 100, 200)
    assert Box(0, 0, 895, 910).rescaled((895, 910), (504, 512)) == Box(0, 0, 504, 512)
    assert Box(399, 799, 1, 1).rescaled((400, 800), (40, 80)).fits(40, 80)
    assert not Box(0, 0, 895, 910).fits(504, 512)


@pytest.mark.parametrize(
    "value",
    [None, [], "[]", "not JSON", [[[0, 0, 5], []]], [[[0, 0, 5, 5], [[14, 0.0]]]], [[[0, 0, 5, 5], [[1, "x"]]]], [7]],
)
def test_other_forms_are_refused(value):
    with pytest.raises(ValueError, match=r"Expected|Expecting"):
        [parse_augmentation(entry) for entry in augmentation_entries(value)]
