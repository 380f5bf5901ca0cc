"""Normalization, and the description of the preprocessing by an evaluation transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as F

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

ChannelValues = tuple[float, float, float]


class ToNormalized(nn.Module):
    """Convert an 8-bit image to float [3, H, W]: scale to 0-1, subtract the mean, divide by the standard deviation.

    Args:
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = list(mean)
        self.std = list(std)
        self.changes = any(self.mean) or any(value != 1 for value in self.std)

    def forward(self, image: Image.Image) -> torch.Tensor:
        """Convert and normalize."""
        # Not `to_dtype(scale=True)`, whose product with 1 / 255 differs from the quotient in the last bit.
        pixels = F.pil_to_tensor(image).to(torch.float32).div_(255)
        return F.normalize(pixels, self.mean, self.std, inplace=True) if self.changes else pixels


def preprocessing(
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str,
    resize_mode: Literal["shortest", "squash"],
    resize: int | None = None,
) -> dict[str, Any]:
    """Return the description of an evaluation transform, as plain data for checkpoints and exports.

    Args:
        image_size: side of the square result, pixels.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
        interpolation: interpolation of the resize.
        resize_mode: "squash" resizes both sides to ``resize``; "shortest" resizes the shorter side to ``resize`` and
            crops the center.
        resize: size of the resized side, if it differs from ``image_size``, pixels.
    """
    return {
        "image_size": image_size,
        "mean": [float(value) for value in mean],
        "std": [float(value) for value in std],
        "interpolation": interpolation,
        "resize_mode": resize_mode,
        "resize": None if resize == image_size else resize,
    }


def preprocessing_of(transform: nn.Module) -> dict[str, Any]:
    """Return the attribute ``preprocessing`` of an evaluation transform, or the name of its class if it has none."""
    found: dict[str, Any] | None = getattr(transform, "preprocessing", None)
    kind = type(transform)
    return {"transform": f"{kind.__module__}.{kind.__qualname__}"} if found is None else dict(found)
