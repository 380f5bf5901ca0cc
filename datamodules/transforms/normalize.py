"""Normalization of 8-bit images, in the loader or on the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as F

from ...common.ranges import CheckedArguments

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ToNormalized(nn.Module):
    """Convert 8-bit images to float [3, H, W]: scale to 0-1, subtract the mean, divide by the standard deviation.

    Args:
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = list(mean)
        self.std = list(std)
        self.changes = any(self.mean) or any(value != 1 for value in self.std)
        self._constants: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def forward(self, image: Image.Image | torch.Tensor) -> torch.Tensor:
        """Convert and normalize an image, or uint8 [..., 3, H, W] on any device."""
        pixels = F.pil_to_tensor(image) if isinstance(image, Image.Image) else image
        scale, mean, std = self._on(pixels.device)
        # Not `to_dtype(scale=True)`, whose product with 1 / 255 differs from the quotient in the last bit. A GPU also
        # multiplies if the divisor is a number instead of a tensor.
        pixels = pixels.to(torch.float32).div_(scale)
        return pixels.sub_(mean).div_(std) if self.changes else pixels

    def _on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the constants on a device; they are copied there once, since the host waits for the copy."""
        if device not in self._constants:
            rows = torch.tensor([[255.0] * 3, self.mean, self.std], device=device)
            self._constants[device] = rows.view(3, 3, 1, 1).unbind()
        return self._constants[device]


class NormalizedTransform(CheckedArguments, nn.Module):
    """Base of the transforms that edit an 8-bit image, then normalize it.

    Loader workers apply `edit` only, and send bytes; the images are normalized on the device (`in_pixels`).
    A subclass that overrides `forward` sends floats.

    Attributes:
        finish: the normalization.
    """

    finish: ToNormalized

    def edit(self, image: Image.Image, *augmentations: Any) -> Image.Image:
        """Return the 8-bit image before the normalization.

        Args:
            image: RGB image of any size.
            *augmentations: recorded augmentations, if the transform replays these.
        """
        raise NotImplementedError

    def forward(self, image: Image.Image, *augmentations: Any) -> torch.Tensor:
        """Convert an RGB image of any size to float [3, H, W]; arguments as in `edit`."""
        converted: torch.Tensor = self.finish(self.edit(image, *augmentations))
        return converted


class ToPixels(nn.Module):
    """The steps of a transform before its normalization, from an RGB image to uint8 [3, H, W]."""

    def __init__(self, transform: NormalizedTransform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, image: Image.Image, *augmentations: Any) -> torch.Tensor:
        """Edit an image; arguments as in `NormalizedTransform.edit`."""
        pixels: torch.Tensor = F.pil_to_tensor(self.transform.edit(image, *augmentations))
        return pixels


def normalization_of(transform: nn.Module) -> ToNormalized | None:
    """Return a copy of the normalization at the end of a transform; None if it has none, or may do more after it."""
    # A copy, whose constants on a device are not sent to loader workers.
    return copy.deepcopy(transform.finish) if _ends_normalized(transform) else None


def in_pixels(transform: nn.Module) -> nn.Module:
    """Return a transform without its normalization; the transform itself if `normalization_of` is None."""
    return ToPixels(transform) if _ends_normalized(transform) else transform


def _ends_normalized(transform: nn.Module) -> TypeGuard[NormalizedTransform]:
    return isinstance(transform, NormalizedTransform) and type(transform).forward is NormalizedTransform.forward


def normalized(batch: Any, finish: ToNormalized | None) -> Any:
    """Return a batch (a dict) whose uint8 images [..., 3, H, W] are normalized, on the device where they are."""
    if finish is None or not isinstance(batch, Mapping):
        return batch
    pixels = {
        name: value
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim >= 4
    }
    return {**batch, **{name: finish(value) for name, value in pixels.items()}} if pixels else batch
