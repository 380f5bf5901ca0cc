"""RandAugment against slow references written from the authors' definitions (OpenCV's conventions, pixel by pixel)."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from vlightning.common.errors import UserError
from vlightning.datamodules.base.sampling import seeded
from vlightning.datamodules.transforms.albef import (
    ALBEF_OPERATIONS,
    ALBEFEvalTransform,
    ALBEFRandAugment,
    ALBEFTrainTransform,
)
from vlightning.datamodules.transforms.normalize import CLIP_MEAN, CLIP_STD

FILL = 128.0


@pytest.fixture(scope="module")
def image():
    y, x = np.mgrid[0:37, 0:45]
    waves = [100 + 60 * np.sin(x / 5 + shift) + 40 * np.cos(y / 4 - shift) for shift in (0.0, 1.0, 2.0)]
    return Image.fromarray(np.stack(waves, -1).clip(0, 230).astype(np.uint8))


def warp(image, inverse):
    """Each output pixel from the linear interpolation at `inverse(x, y)`; pixel centers have whole coordinates."""
    source = np.asarray(image).astype(float)
    height, width, _ = source.shape
    out = np.full_like(source, FILL)
    sure = np.zeros((height, width), bool)
    for y in range(height):
        for x in range(width):
            u, v = inverse(x, y)
            sure[y, x] = u < -1 or v < -1 or u > width or v > height
            if 0 <= u <= width - 1 and 0 <= v <= height - 1:
                sure[y, x] = True
                i, j = min(int(u), width - 2), min(int(v), height - 2)
                a, b = u - i, v - j
                out[y, x] = (
                    source[j, i] * (1 - a) * (1 - b)
                    + source[j, i + 1] * a * (1 - b)
                    + source[j + 1, i] * (1 - a) * b
                    + source[j + 1, i + 1] * a * b
                )
    return out, sure  # at the very edge OpenCV and Pillow blend with the outside differently


def rotation(image, degrees):
    """The inverse of OpenCV's `getRotationMatrix2D` about (W/2, H/2), positive counter-clockwise."""
    cx, cy = image.width / 2, image.height / 2
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return lambda x, y: (cx + c * (x - cx) - s * (y - cy), cy + s * (x - cx) + c * (y - cy))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("operation", ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"])
def test_geometric_operations_equal_the_reference(image, operation, sign):
    inverse = {
        "ShearX": lambda x, y: (x - sign * 0.21 * y, y),
        "ShearY": lambda x, y: (x, y - sign * 0.21 * x),
        "TranslateX": lambda x, y: (x - sign * 7, y),
        "TranslateY": lambda x, y: (x, y - sign * 7),
        "Rotate": rotation(image, sign * 21),
    }[operation]
    expected, sure = warp(image, inverse)
    found = np.asarray(ALBEFRandAugment().operate(image, operation, sign)).astype(float)
    assert sure.mean() > 0.9
    assert np.abs(found - expected)[sure].max() <= 2
    assert np.abs(found - np.asarray(image)).max() > 20


def test_brightness_multiplies(image):
    expected = np.floor(np.asarray(image).astype(float) * 1.36).clip(0, 255)
    found = np.asarray(ALBEFRandAugment().operate(image, "Brightness")).astype(float)
    assert np.abs(found - expected).max() <= 1


def test_sharpness_moves_away_from_the_smoothed_image(image):
    source = np.asarray(image).astype(float)
    expected = source.copy()
    for y in range(1, source.shape[0] - 1):
        for x in range(1, source.shape[1] - 1):
            smooth = (source[y - 1 : y + 2, x - 1 : x + 2].sum((0, 1)) + 4 * source[y, x]) / 13
            expected[y, x] = np.round(smooth) + 1.36 * (source[y, x] - np.round(smooth))
    found = np.asarray(ALBEFRandAugment().operate(image, "Sharpness")).astype(float)
    assert np.abs(found - expected.clip(0, 255)).max() <= 1
    assert (found != source).any()


def test_autocontrast_stretches_each_channel(image):
    source = np.asarray(image).astype(float)
    low, high = source.min((0, 1)), source.max((0, 1))
    expected = np.floor((source - low) * 255 / (high - low))
    found = np.asarray(ALBEFRandAugment().operate(image, "AutoContrast")).astype(float)
    assert np.abs(found - expected).max() <= 1
    assert found.max() == 255
    assert found.min() == 0


def test_equalize_follows_the_histogram(image):
    source = np.asarray(image)
    found = np.asarray(ALBEFRandAugment().operate(image, "Equalize"))
    for channel in range(3):
        counts = [int((source[..., channel] == value).sum()) for value in range(256)]
        used = [count for count in counts if count]
        step = sum(used[:-1]) // 255
        table, total = [], step // 2
        for count in counts:
            table.append(min(total // step, 255))
            total += count
        assert np.array_equal(found[..., channel], np.array(table)[source[..., channel]])


def test_level_seven_gives_the_authors_numbers():
    augment = ALBEFRandAugment()
    assert augment.factor == pytest.approx(1.36)
    assert augment.shear == pytest.approx(0.21)
    assert augment.translate == pytest.approx(7)
    assert augment.rotate == pytest.approx(21)
    assert augment.fill == [128, 128, 128]
    assert augment.num_ops == 2


def test_each_operation_is_drawn_equally_often_and_skipped_half_the_time(image, monkeypatch):
    augment = ALBEFRandAugment()
    drawn = []
    monkeypatch.setattr(augment, "operate", lambda image, operation, sign: drawn.append((operation, sign)) or image)
    with seeded(0):
        for _ in range(4000):
            augment(image)
    assert len(drawn) == pytest.approx(4000, abs=200)  # 2 draws, each kept with probability 1/2; 4 standard deviations
    for operation in ALBEF_OPERATIONS:
        assert sum(name == operation for name, _ in drawn) == pytest.approx(400, abs=85)
    assert sum(sign == 1 for _, sign in drawn) == pytest.approx(2000, abs=150)


def test_unknown_operation_is_named():
    with pytest.raises(UserError, match=r"got \['Color'\]"):
        ALBEFRandAugment(operations=["Color", "Rotate"])


def test_eval_transform_resizes_to_a_square_and_normalizes(image):
    found = ALBEFEvalTransform(16)(image)
    resized = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)).astype(np.float32) / 255
    expected = (resized - np.array(CLIP_MEAN)) / np.array(CLIP_STD)
    assert found.shape == (3, 16, 16)
    assert found.dtype == torch.float32
    assert np.abs(found.numpy().transpose(1, 2, 0) - expected).max() < 1e-5


def test_train_transform_is_a_function_of_the_seed(image):
    transform = ALBEFTrainTransform(24)
    results = []
    for seed in (1, 1, 2):
        with seeded(seed):
            results.append(transform(image))
    assert results[0].shape == (3, 24, 24)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_flip_has_a_switch(image):
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    whole = {"scale": (1.0, 1.0), "ratio": (45 / 37, 45 / 37), "rand_augment": False}
    always, never = (
        ALBEFTrainTransform(24, horizontal_flip=1.0, **whole),
        ALBEFTrainTransform(24, horizontal_flip=0.0, **whole),
    )
    assert torch.equal(never(image), ALBEFEvalTransform(24)(image))
    assert torch.allclose(always(image), ALBEFEvalTransform(24)(mirrored), atol=0.05)
    assert not torch.allclose(always(image), never(image), atol=0.05)


def test_crops_keep_to_their_scale():
    # An image whose red runs with x and whose green runs with y tells which part of it was cut out.
    side = 200
    ramp = np.zeros((side, side, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(side)[None], np.arange(side)[:, None]
    transform = ALBEFTrainTransform(
        50, (0.2, 0.6), horizontal_flip=0.0, rand_augment=False, mean=(0, 0, 0), std=(1, 1, 1)
    )
    shares = []
    with seeded(0):
        for _ in range(200):
            crop = transform(Image.fromarray(ramp)) * 255
            wide = (crop[0].max() - crop[0].min()) / side
            high = (crop[1].max() - crop[1].min()) / side
            shares.append(float(wide * high))
    assert 0.17 < min(shares) < 0.25
    assert 0.5 < max(shares) < 0.62
