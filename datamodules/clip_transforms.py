"""Image transforms of CLIP-like models: evaluation as in the CLIP paper, and recorded augmentations in training."""

from __future__ import annotations

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from .replay import Augmentation, Interpolation, replay
from .transforms import ToNormalized

Three = tuple[float, float, float]


class CLIPEvalTransform(nn.Module):
    """The shorter side resized, the middle cropped, normalised.

    Args:
        size: side of the square result, pixels (MobileCLIP: 256; its ViTs: 224).
        mean: of each channel, on the 0-1 scale; 0 and a deviation of 1 leave that scale, as with most of MobileCLIP.
        std: of each channel, on the 0-1 scale.
        interpolation: of the resizing (MobileCLIP: bilinear).
    """

    def __init__(
        self,
        size: int = 256,
        mean: Three = (0.0, 0.0, 0.0),
        std: Three = (1.0, 1.0, 1.0),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        super().__init__()
        self.resize = v2.Resize(size, interpolation=InterpolationMode(interpolation))
        self.crop = v2.CenterCrop(size)
        self.finish = ToNormalized(mean, std)

    def forward(self, image: Image.Image) -> torch.Tensor:
        """Turn an RGB picture of any size into float [3, size, size]."""
        return self.finish(self.crop(self.resize(image)))


class ReplayTransform(nn.Module):
    """A recorded augmentation at the student's resolution, normalised as the student wants it.

    Args:
        size: side of the square result, pixels.
        mean: of each channel, on the 0-1 scale.
        std: of each channel, on the 0-1 scale.
        interpolation: of the crop.
    """

    def __init__(
        self,
        size: int = 256,
        mean: Three = (0.0, 0.0, 0.0),
        std: Three = (1.0, 1.0, 1.0),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        super().__init__()
        self.size = size
        self.interpolation: Interpolation = interpolation
        self.finish = ToNormalized(mean, std)

    def forward(self, image: Image.Image, augmentation: Augmentation) -> torch.Tensor:
        """Turn an RGB picture into float [3, size, size]."""
        return self.finish(replay(image, augmentation, self.size, self.interpolation))
