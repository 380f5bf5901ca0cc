"""The usual transforms of image classification on CIFAR and ImageNet, with every number an argument."""

from __future__ import annotations

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from .albef import ToNormalized, preprocessing

# Of CIFAR-100's training images, as in the CRD benchmark (arXiv 1910.10699).
CIFAR100_MEAN = (0.5071, 0.4867, 0.4408)
CIFAR100_STD = (0.2675, 0.2565, 0.2761)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class CIFARTrainTransform(nn.Module):
    """CIFAR's training transform: pad and crop, mirror, normalise. No colour jitter, no blur.

    Images of another size are resized to the square first.

    Args:
        size: side of the result, pixels.
        padding: black pixels on each side before the crop.
        horizontal_flip: probability of mirroring.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: int = 32,
        padding: int = 4,
        horizontal_flip: float = 0.5,
        mean: tuple[float, float, float] = CIFAR100_MEAN,
        std: tuple[float, float, float] = CIFAR100_STD,
    ) -> None:
        super().__init__()
        self.resize = _ToSquare(size)
        self.crop = v2.RandomCrop(size, padding=padding)
        self.flip = v2.RandomHorizontalFlip(horizontal_flip)
        self.finish = ToNormalized(mean, std)

    def forward(self, image: Image.Image) -> torch.Tensor:
        """Turn an RGB image of any size into float [3, size, size]."""
        return self.finish(self.flip(self.crop(self.resize(image))))


class CIFAREvalTransform(nn.Module):
    """CIFAR's test transform: normalisation, after a resize to the square where the size is another.

    Args:
        size: side of the result, pixels.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: int = 32,
        mean: tuple[float, float, float] = CIFAR100_MEAN,
        std: tuple[float, float, float] = CIFAR100_STD,
    ) -> None:
        super().__init__()
        self.resize = _ToSquare(size)
        self.finish = ToNormalized(mean, std)
        self.preprocessing = preprocessing(size, mean, std, "bicubic", "squash")

    def forward(self, image: Image.Image) -> torch.Tensor:
        """Turn an RGB image of any size into float [3, size, size]."""
        return self.finish(self.resize(image))


class ImageNetTrainTransform(nn.Module):
    """ImageNet's training transform: random resized crop, mirror, normalise.

    Args:
        size: side of the result, pixels.
        scale: share of the image that a crop covers.
        horizontal_flip: probability of mirroring.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: int = 224,
        scale: tuple[float, float] = (0.08, 1.0),
        horizontal_flip: float = 0.5,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.crop = v2.RandomResizedCrop(size, scale=scale, interpolation=InterpolationMode.BILINEAR)
        self.flip = v2.RandomHorizontalFlip(horizontal_flip)
        self.finish = ToNormalized(mean, std)

    def forward(self, image: Image.Image) -> torch.Tensor:
        """Turn an RGB image of any size into float [3, size, size]."""
        return self.finish(self.flip(self.crop(image)))


class ImageNetEvalTransform(nn.Module):
    """ImageNet's test transform: the shorter side resized, the middle cropped, normalised.

    Args:
        size: side of the result, pixels.
        resize: the shorter side before the crop, pixels; by default 8/7 of ``size`` (256 for 224).
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: int = 224,
        resize: int | None = None,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        resize = resize or round(size * 8 / 7)
        self.resize = v2.Resize(resize, interpolation=InterpolationMode.BILINEAR)
        self.crop = v2.CenterCrop(size)
        self.finish = ToNormalized(mean, std)
        self.preprocessing = preprocessing(size, mean, std, "bilinear", "shortest", resize)

    def forward(self, image: Image.Image) -> torch.Tensor:
        """Turn an RGB image of any size into float [3, size, size]."""
        return self.finish(self.crop(self.resize(image)))


class _ToSquare(nn.Module):
    """Resize to a square, where the image is not one of that size already."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, image: Image.Image) -> Image.Image:
        side = (self.size, self.size)
        return image if image.size == side else image.resize(side, Image.Resampling.BICUBIC)
