"""The training augmentation of linear probes and fine-tuning."""

from __future__ import annotations

from typing import Annotated

import torch
from PIL import Image
from torch import nn

from ...common.ranges import COUNT, FINITE, POSITIVE, POSITIVE_SHARE, SHARE, CheckedArguments
from .normalize import IMAGENET_MEAN, IMAGENET_STD


class ProbeTrainTransform(CheckedArguments, nn.Module):
    """Apply timm's training transform: random resized crop, flip, RandAugment, normalization, random erasing.

    It draws from Python's, numpy's and torch's global generators. RandAugment draws two operations, skips each with
    probability 1/2, and draws the level of each around the magnitude; color operations increase or decrease.

    Args:
        size: side of the result, pixels.
        scale: smallest and largest share of the image's area in the crop (timm's default).
        horizontal_flip: probability of a flip.
        rand_augment: timm's configuration string: "m" is the magnitude, "n" the number of operations (2 by default),
            "mstd" the standard deviation of the level; "inc1" makes the strength of each operation grow with its level.
        erase: probability of erasing a rectangle, whose pixels are drawn from the standard normal distribution.
        interpolation: interpolation of the crop and of RandAugment.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 224,
        scale: Annotated[tuple[float, float], POSITIVE_SHARE] = (0.08, 1.0),
        horizontal_flip: Annotated[float, SHARE] = 0.5,
        rand_augment: str = "rand-m9-mstd0.5-inc1",
        erase: Annotated[float, SHARE] = 0.25,
        interpolation: str = "bicubic",
        mean: Annotated[tuple[float, float, float], FINITE] = IMAGENET_MEAN,
        std: Annotated[tuple[float, float, float], POSITIVE] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        from timm.data import create_transform  # takes a second to import, and few runs need it

        self.transform = create_transform(
            size,
            is_training=True,
            scale=scale,
            hflip=horizontal_flip,
            auto_augment=rand_augment,
            re_prob=erase,
            re_mode="pixel",
            interpolation=interpolation,
            mean=mean,
            std=std,
        )

    def forward(self, image: Image.Image) -> torch.Tensor:
        """Convert an RGB image of any size to float [3, size, size]."""
        transformed: torch.Tensor = self.transform(image)
        return transformed
