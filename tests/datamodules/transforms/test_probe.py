"""The probe's augmentation is timm's recipe, and a function of the seeds that the datamodules set."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing

from support.data.images import draw_image
from vlightning.datamodules import ProbeTrainTransform
from vlightning.datamodules.base.sampling import seeded
from vlightning.datamodules.transforms.normalize import IMAGENET_MEAN, IMAGENET_STD


def drawn(transform, seed, image=None):
    with seeded(seed):
        return transform(image or draw_image(3))


def test_it_is_timms_recipe():
    theirs = create_transform(
        24,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
    ours = ProbeTrainTransform(24)
    for seed in range(20):
        found = drawn(ours, seed)
        assert found.shape == (3, 24, 24)
        assert torch.equal(found, drawn(theirs, seed)), seed
    (augment,) = (step for step in ours.transform.transforms if isinstance(step, RandAugment))
    assert augment.num_layers == 2
    assert {(op.magnitude, op.magnitude_std, op.prob) for op in augment.ops} == {(9, 0.5, 0.5)}
    assert {"SolarizeIncreasing", "PosterizeIncreasing"} <= {op.name for op in augment.ops}
    (erasing,) = (step for step in ours.transform.transforms if isinstance(step, RandomErasing))
    assert (erasing.probability, erasing.per_pixel, erasing.device) == (0.25, True, "cpu")


def test_draws_are_those_of_the_seed_alone():
    transform = ProbeTrainTransform(24)
    images = [drawn(transform, seed) for seed in range(10)]
    torch.manual_seed(5)
    np.random.seed(5)
    for seed, found in enumerate(images):
        assert torch.equal(drawn(ProbeTrainTransform(24), seed), found), seed
        assert not torch.equal(drawn(transform, seed + 100), found)


def test_a_quarter_of_the_images_lose_a_rectangle_to_noise():
    transform = ProbeTrainTransform(24, scale=(1.0, 1.0), horizontal_flip=0.0, rand_augment="rand-m0-n0")
    plain = Image.new("RGB", (24, 24), tuple(round(255 * value) for value in IMAGENET_MEAN))  # about zero, normalized
    found = [drawn(transform, seed, plain).abs() > 0.02 for seed in range(1000)]
    erased = [pixels for pixels in found if pixels.any()]
    assert len(erased) == pytest.approx(250, abs=4 * math.sqrt(1000 * 0.25 * 0.75))
    for pixels in erased:
        rows, columns = pixels.any(0).any(1), pixels.any(0).any(0)
        assert pixels[:, rows][:, :, columns].float().mean() > 0.9
