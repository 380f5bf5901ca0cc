"""Transforms of image classification: on CIFAR and ImageNet as in torchvision, of probes as in timm."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from ...common.ranges import COUNT, FINITE, NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, SHARE, CheckedArguments
from .clip import CLIPEvalTransform
from .normalize import IMAGENET_MEAN, IMAGENET_STD, NormalizedTransform, ToNormalized

# Mean and standard deviation of CIFAR-100's training images, as in the CRD benchmark (arXiv 1910.10699).
CIFAR100_MEAN = (0.5071, 0.4867, 0.4408)
CIFAR100_STD = (0.2675, 0.2565, 0.2761)


class _NormalizedCompose(NormalizedTransform):
    """Compose transforms of PIL images, and normalize the result."""

    def __init__(
        self, transforms: list[nn.Module], mean: tuple[float, float, float], std: tuple[float, float, float]
    ) -> None:
        super().__init__()
        self.steps = v2.Compose(transforms)
        self.finish = ToNormalized(mean, std)

    def edit(self, image: Image.Image, *augmentations: Any) -> Image.Image:
        """Apply the transforms to an RGB image of any size."""
        edited: Image.Image = self.steps(image)
        return edited


class CIFARTrainTransform(_NormalizedCompose):
    """Pad and crop, flip, normalize: CIFAR's training transform. Images of another size are resized first.

    Args:
        size: side of the result, pixels.
        padding: black pixels on each side before the crop.
        horizontal_flip: probability of a flip.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 32,
        padding: Annotated[int, NOT_NEGATIVE] = 4,
        horizontal_flip: Annotated[float, SHARE] = 0.5,
        mean: Annotated[tuple[float, float, float], FINITE] = CIFAR100_MEAN,
        std: Annotated[tuple[float, float, float], POSITIVE] = CIFAR100_STD,
    ) -> None:
        super().__init__(
            [
                v2.Resize((size, size), InterpolationMode.BICUBIC),
                v2.RandomCrop(size, padding=padding),
                v2.RandomHorizontalFlip(horizontal_flip),
            ],
            mean,
            std,
        )


class CIFAREvalTransform(CLIPEvalTransform):
    """Normalize: CIFAR's test transform. Images of another size are resized first.

    Args:
        size: side of the result, pixels.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 32,
        mean: Annotated[tuple[float, float, float], FINITE] = CIFAR100_MEAN,
        std: Annotated[tuple[float, float, float], POSITIVE] = CIFAR100_STD,
    ) -> None:
        super().__init__(size, mean, std, "bicubic", "squash")


class ImageNetTrainTransform(_NormalizedCompose):
    """Crop at random, flip, normalize: ImageNet's training transform.

    Args:
        size: side of the result, pixels.
        scale: smallest and largest share of the image's area in the crop.
        horizontal_flip: probability of a flip.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 224,
        scale: Annotated[tuple[float, float], POSITIVE_SHARE] = (0.08, 1.0),
        horizontal_flip: Annotated[float, SHARE] = 0.5,
        mean: Annotated[tuple[float, float, float], FINITE] = IMAGENET_MEAN,
        std: Annotated[tuple[float, float, float], POSITIVE] = IMAGENET_STD,
    ) -> None:
        super().__init__(
            [
                v2.RandomResizedCrop(size, scale=scale, interpolation=InterpolationMode.BILINEAR),
                v2.RandomHorizontalFlip(horizontal_flip),
            ],
            mean,
            std,
        )


class ImageNetEvalTransform(CLIPEvalTransform):
    """Resize the shorter side, crop the center, normalize: ImageNet's test transform.

    Args:
        size: side of the result, pixels.
        resize: size of the shorter side before the crop, pixels; by default 8/7 of `size` (256 for 224).
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 224,
        resize: int | None = None,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__(size, mean, std, "bilinear", "shortest", resize or round(size * 8 / 7))


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
