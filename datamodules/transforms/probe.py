"""The augmentation with which image encoders are probed and fine-tuned."""

from __future__ import annotations

import torch
from PIL import Image
from timm.data import create_transform
from torch import nn

from .classification import IMAGENET_MEAN, IMAGENET_STD


class ProbeTrainTransform(nn.Module):
    """timm's training transform: random resized crop, mirror, RandAugment, normalise, random erasing.

    Its draws are Python's, numpy's and torch's. Two operations of RandAugment are drawn, each is left out with
    probability 1/2, and the level of each is drawn about the magnitude; those of colour go either way from none.

    Args:
        size: side of the result, pixels.
        scale: share of the image that a crop covers (timm's default).
        horizontal_flip: probability of mirroring.
        rand_augment: timm's name of the variant: "m" the magnitude, "n" the operations drawn (2 by default), "mstd" the
            standard deviation of the level, "inc1" for operations that all grow with it.
        erase: probability of erasing a rectangle, whose pixels are drawn from the standard normal distribution.
        interpolation: interpolation of the crop and of RandAugment.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: int = 224,
        scale: tuple[float, float] = (0.08, 1.0),
        horizontal_flip: float = 0.5,
        rand_augment: str = "rand-m9-mstd0.5-inc1",
        erase: float = 0.25,
        interpolation: str = "bicubic",
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
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
        """Turn an RGB image of any size into float [3, size, size]."""
        transformed: torch.Tensor = self.transform(image)
        return transformed
