"""Image transforms of CLIP models: evaluation as in the CLIP paper, recorded augmentations in training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from ...common.preprocessing import Interpolation, Preprocessing, Three
from ...common.ranges import COUNT, FINITE, POSITIVE
from .normalize import NormalizedTransform, ToNormalized
from .replay import Augmentation, replay


class CLIPEvalTransform(NormalizedTransform):
    """Resize the shorter side, crop the center, normalize.

    Args:
        size: side of the square result, pixels (MobileCLIP: 256; its ViTs: 224).
        mean: mean of each channel, on the 0-1 scale (most of MobileCLIP: mean 0 and standard deviation 1, which keep
            the 0-1 scale).
        std: standard deviation of each channel, on the 0-1 scale.
        interpolation: interpolation of the resize (MobileCLIP: bilinear).
        resize_mode: "shortest" resizes the shorter side; "squash" resizes both sides, which changes the aspect ratio
            (SigLIP).
        resize: size of the shorter side before the crop, pixels; by default `size`.
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 256,
        mean: Annotated[Three, FINITE] = (0.0, 0.0, 0.0),
        std: Annotated[Three, POSITIVE] = (1.0, 1.0, 1.0),
        interpolation: Interpolation = "bilinear",
        resize_mode: Literal["shortest", "squash"] = "shortest",
        resize: Annotated[int | None, COUNT] = None,
    ) -> None:
        super().__init__()
        side = resize or size
        squash = resize_mode == "squash"
        self.resize = v2.Resize((side, side) if squash else side, interpolation=InterpolationMode(interpolation))
        self.crop = v2.CenterCrop(size)
        self.finish = ToNormalized(mean, std)
        self.preprocessing = Preprocessing(size, mean, std, interpolation, resize_mode, resize).as_dict()

    def edit(self, image: Image.Image, *augmentations: Any) -> Image.Image:
        """Resize and crop an RGB image of any size."""
        edited: Image.Image = self.crop(self.resize(image))
        return edited


class ReplayTransform(NormalizedTransform):
    """Replay a recorded augmentation at the student's resolution and normalize.

    Args:
        size: side of the square result, pixels.
        mean: mean of each channel, on the 0-1 scale.
        std: standard deviation of each channel, on the 0-1 scale.
        interpolation: interpolation of the crop.
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

    def edit(self, image: Image.Image, *augmentations: Augmentation) -> Image.Image:
        """Replay one augmentation of an RGB image."""
        (augmentation,) = augmentations
        return replay(image, augmentation, self.size, self.interpolation)
