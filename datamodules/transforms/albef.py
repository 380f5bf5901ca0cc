"""ALBEF's image transforms; every number is an argument.

The defaults are those of the authors' pre-training code: `RandomResizedCrop` with scale 0.2-1, horizontal flip, two
operations of their RandAugment pool, and the mean and standard deviation of CLIP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from ...common.errors import UserError
from ...common.ranges import (
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    CheckedArguments,
    Range,
)
from .clip import CLIPEvalTransform
from .normalize import CLIP_MEAN, CLIP_STD, NormalizedTransform, ToNormalized

Operation = Literal[
    "Identity",
    "AutoContrast",
    "Equalize",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
]
ALBEF_OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class ALBEFRandAugment(CheckedArguments, nn.Module):
    """Apply the authors' RandAugment: operations drawn with replacement, each skipped with a fixed probability.

    The sign of a geometric operation is drawn with equal probability; brightness and sharpness only increase (at level
    7 both factors are 1.36). Shears keep the first row or column in place, rotation is about the center, and geometric
    operations interpolate linearly.

    Args:
        num_ops: number of operations drawn for each image (authors: 2).
        magnitude: level of all operations, at most `max_magnitude` (authors: 7).
        max_magnitude: the highest level (authors: 10).
        skip_probability: probability of skipping a drawn operation (authors: 0.5).
        operations: operations to draw from (authors: these ten, without color operations).
        enhance_range: brightness and sharpness factor at level 0 and at the highest level (authors: 0.1 to 1.9).
        max_shear: shear at the highest level, pixels per pixel (authors: 0.3).
        max_translate: translation at the highest level, pixels (authors: 10).
        max_rotate: angle at the highest level, degrees (authors: 30).
        fill: color of pixels outside of the image (authors: 128, 128, 128).

    Raises:
        UserError: If an operation is unknown.
    """

    def __init__(
        self,
        num_ops: Annotated[int, NOT_NEGATIVE] = 2,
        magnitude: Annotated[float, NOT_NEGATIVE] = 7,
        max_magnitude: Annotated[float, POSITIVE] = 10,
        skip_probability: Annotated[float, SHARE] = 0.5,
        operations: Sequence[Operation] = ALBEF_OPERATIONS,
        enhance_range: Annotated[tuple[float, float], NOT_NEGATIVE] = (0.1, 1.9),
        max_shear: Annotated[float, NOT_NEGATIVE] = 0.3,
        max_translate: Annotated[float, NOT_NEGATIVE] = 10,
        max_rotate: Annotated[float, NOT_NEGATIVE] = 30,
        fill: Annotated[tuple[int, int, int], Range(least=0, most=255)] = (128, 128, 128),
    ) -> None:
        super().__init__()
        unknown = sorted(set(operations) - set(ALBEF_OPERATIONS))
        if unknown:
            raise UserError(
                f"Expected operations among {', '.join(ALBEF_OPERATIONS)}, got {unknown}: correct the names."
            )
        level = magnitude / max_magnitude
        self.num_ops = num_ops
        self.skip_probability = skip_probability
        self.operations = tuple(operations)
        self.factor = enhance_range[0] + level * (enhance_range[1] - enhance_range[0])
        self.shear = level * max_shear
        self.translate = level * max_translate
        self.rotate = level * max_rotate
        self.fill = list(fill)

    def forward(self, image: Image.Image) -> Image.Image:
        """Augment an 8-bit RGB image; draws from torch's CPU generator."""
        for choice in torch.randint(len(self.operations), (self.num_ops,)).tolist():
            skip, sign = torch.rand(2).tolist()
            if skip >= self.skip_probability:
                image = self.operate(image, self.operations[choice], -1 if sign < 0.5 else 1)
        return image

    def operate(self, image: Image.Image, operation: Operation, sign: Literal[-1, 1] = 1) -> Image.Image:
        """Apply one operation at the configured level.

        Args:
            image: 8-bit RGB image.
            operation: name of the operation.
            sign: direction of a geometric operation: +1 shears and translates towards larger coordinates and rotates
                counterclockwise.
        """
        # The origin of OpenCV, which the authors use, is the center of the first pixel; that of torchvision is its
        # corner.
        corner = [0.5, 0.5]
        middle = [image.width / 2 + 0.5, image.height / 2 + 0.5]
        slope = -sign * math.degrees(math.atan(self.shear))  # torchvision's positive shear has the opposite direction
        match operation:
            case "Identity":
                return image
            case "AutoContrast":
                return F.autocontrast(image)
            case "Equalize":
                return F.equalize(image)
            case "Brightness":
                return F.adjust_brightness(image, self.factor)
            case "Sharpness":
                return F.adjust_sharpness(image, self.factor)
            case "ShearX":
                return self._affine(image, shear=[slope, 0.0], center=corner)
            case "ShearY":
                return self._affine(image, shear=[0.0, slope], center=corner)
            case "TranslateX":
                return self._affine(image, translate=[sign * self.translate, 0.0])
            case "TranslateY":
                return self._affine(image, translate=[0.0, sign * self.translate])
            case "Rotate":
                return self._affine(image, angle=-sign * self.rotate, center=middle)

    def _affine(
        self,
        image: Image.Image,
        angle: float = 0.0,
        translate: Sequence[float] = (0.0, 0.0),
        shear: Sequence[float] = (0.0, 0.0),
        center: list[float] | None = None,
    ) -> Image.Image:
        return F.affine(
            image,
            angle=angle,
            translate=list(translate),
            scale=1.0,
            shear=list(shear),
            interpolation=InterpolationMode.BILINEAR,
            fill=self.fill,
            center=center,
        )


class ALBEFTrainTransform(NormalizedTransform):
    """Apply ALBEF's training transform: random crop, flip, RandAugment, normalization.

    Args:
        size: side of the square result, pixels (authors: 256 for pre-training).
        scale: smallest and largest share of the image's area in the crop (authors: 0.2 to 1 for pre-training, 0.5 to
            1 for fine-tuning). None resizes the whole image instead of a crop (authors: for grounding).
        ratio: smallest and largest aspect ratio of the crop (torchvision's default, which the authors use).
        horizontal_flip: probability of a flip; 0 where captions distinguish left and right (authors: 0.5).
        rand_augment: whether to apply `ALBEFRandAugment`, with the further arguments.
        mean: mean of each channel, on the 0-1 scale (authors: CLIP's).
        std: standard deviation of each channel, on the 0-1 scale (authors: CLIP's).
        interpolation: interpolation of the crop (authors: bicubic).
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 256,
        scale: Annotated[tuple[float, float] | None, POSITIVE_SHARE] = (0.2, 1.0),
        ratio: Annotated[tuple[float, float], POSITIVE] = (3 / 4, 4 / 3),
        horizontal_flip: Annotated[float, SHARE] = 0.5,
        rand_augment: bool = True,
        mean: Annotated[tuple[float, float, float], FINITE] = CLIP_MEAN,
        std: Annotated[tuple[float, float, float], POSITIVE] = CLIP_STD,
        interpolation: Literal["bilinear", "bicubic"] = "bicubic",
        **options: Any,
    ) -> None:
        super().__init__()
        mode = InterpolationMode(interpolation)
        self.crop = v2.RandomResizedCrop(size, scale, ratio, mode) if scale else v2.Resize((size, size), mode)
        self.flip = v2.RandomHorizontalFlip(horizontal_flip) if horizontal_flip else None
        augment = ALBEFRandAugment(**options)
        self.augment = augment if rand_augment else None
        self.finish = ToNormalized(mean, std)

    def edit(self, image: Image.Image, *augmentations: Any) -> Image.Image:
        """Crop, flip and augment an RGB image of any size."""
        image = self.crop(image)
        if self.flip is not None:
            image = self.flip(image)
        if self.augment is not None:
            image = self.augment(image)
        return image


class ALBEFEvalTransform(CLIPEvalTransform):
    """Apply ALBEF's test transform: resize to a square, ignoring the aspect ratio, and normalize.

    Args:
        size: side of the square result, pixels (authors: 256 for pre-training).
        mean: mean of each channel, on the 0-1 scale (authors: CLIP's).
        std: standard deviation of each channel, on the 0-1 scale (authors: CLIP's).
    """

    def __init__(
        self,
        size: Annotated[int, COUNT] = 256,
        mean: Annotated[tuple[float, float, float], FINITE] = CLIP_MEAN,
        std: Annotated[tuple[float, float, float], POSITIVE] = CLIP_STD,
    ) -> None:
        super().__init__(size, mean, std, "bicubic", "squash")


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
