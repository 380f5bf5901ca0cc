"""Image transforms of CLIP models: evaluation as in the CLIP paper, recorded augmentations in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from ...common.preprocessing import Interpolation, Preprocessing, Three
from ...common.ranges import COUNT, FINITE, POSITIVE
from .albef import ALBEFEvalTransform, ALBEFTrainTransform
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

    def edit(self, image: Image.Image, *given: Any) -> Image.Image:
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

    def edit(self, image: Image.Image, *given: Augmentation) -> Image.Image:
        """Replay the given augmentation of an RGB image."""
        (augmentation,) = given
        return replay(image, augmentation, self.size, self.interpolation)


def pair_eval_transform(size: int, expected: Mapping[str, Any]) -> nn.Module:
    """Build the default evaluation transform of image-caption pairs.

    Args:
        size: side of the square result, pixels.
        expected: preprocessing that trained weights expect, with the keys of `preprocessing`; without a mean,
            ALBEF's transform is built.
    """
    if "mean" not in expected:
        return ALBEFEvalTransform(size)
    larger = expected.get("resize")
    return CLIPEvalTransform(
        size,
        expected["mean"],
        expected["std"],
        expected["interpolation"],
        expected.get("resize_mode", "shortest"),
        larger and round(larger * size / expected["image_size"]),
    )


def pair_train_transform(size: int, expected: Mapping[str, Any], **options: Any) -> ALBEFTrainTransform:
    """Build ALBEF's training transform with the interpolation and normalization that trained weights expect.

    Args:
        size: side of the square result, pixels.
        expected: as in `pair_eval_transform`.
        **options: other arguments of the transform.
    """
    normalization = {name: expected[name] for name in ("mean", "std", "interpolation") if "mean" in expected}
    return ALBEFTrainTransform(size, **options, **normalization)
