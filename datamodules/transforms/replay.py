"""Augmentations that were recorded when a data set was reinforced: drawn, written down, and carried out again.

DataCompDR's form: a crop as a box in pixels of the image that the teacher's crop was taken from, then two operations
of RandAugment, each a number in :data:`OPERATIONS` and a magnitude with its sign. (Reinforcement: arXiv 2303.08983;
MobileCLIP: arXiv 2311.17049.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

Interpolation = Literal["bilinear", "bicubic"]
OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
"""RandAugment's pool by number: torchvision's list in its order."""
_SIGNED = OPERATIONS[1:10]


class Box(NamedTuple):
    """A crop, pixels."""

    top: int
    left: int
    height: int
    width: int

    def fits(self, height: int, width: int) -> bool:
        """Whether it lies inside an image of that size."""
        return (
            self.top >= 0
            and self.left >= 0
            and self.height > 0
            and self.width > 0
            and self.top + self.height <= height
            and self.left + self.width <= width
        )

    def rescaled(self, recorded: tuple[int, int], actual: tuple[int, int]) -> Box:
        """The same part of a copy of the image that has another size.

        Args:
            recorded: height and width that the box was measured on.
            actual: height and width of the copy.
        """
        down, across = (new / old for new, old in zip(actual, recorded, strict=True))
        top, left = min(round(self.top * down), actual[0] - 1), min(round(self.left * across), actual[1] - 1)
        bottom, right = round((self.top + self.height) * down), round((self.left + self.width) * across)
        return Box(top, left, max(min(bottom, actual[0]) - top, 1), max(min(right, actual[1]) - left, 1))


class Augmentation(NamedTuple):
    """A crop, and the operations after it; None stands for one that is left out."""

    box: Box
    operations: tuple[tuple[int, float] | None, ...]

    def as_json(self) -> list[Any]:
        """The entry of ``param_aug``."""
        return [list(self.box), [None if operation is None else list(operation) for operation in self.operations]]


def augmentation_entries(value: Any) -> list[Any]:
    """The augmentations of the entry ``param_aug``, not parsed: a list, or a string that holds the list as JSON.

    (The vendor's shards hold a list; the hub's viewer and its loader make strings of it.)

    Raises:
        ValueError: it is of another form.
    """
    entries = json.loads(value) if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"found {type(entries).__name__} as param_aug, expected a list of augmentations")
    return entries


def parse_augmentation(entry: Any) -> Augmentation:
    """One augmentation of ``param_aug``.

    Raises:
        ValueError: it is of another form.
    """
    try:
        box, operations = entry
        parsed = tuple(None if operation is None else _operation(*operation) for operation in operations)
        return Augmentation(Box(*(int(_finite(side)) for side in box)), parsed)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"found {str(entry)[:80]!r} in param_aug, expected [[top, left, height, width], [[operation, magnitude], "
            "...]]"
        ) from error


def _operation(number: Any, magnitude: Any) -> tuple[int, float]:
    if not 0 <= _finite(number) < len(OPERATIONS) or number != int(number):
        raise ValueError(f"found operation {number}, expected 0 to {len(OPERATIONS) - 1}")
    if OPERATIONS[int(number)] == "Posterize" and not 1 <= _finite(magnitude) <= 8:
        raise ValueError(f"found {magnitude} bits to posterize to, expected 1 to 8")
    return int(number), float(_finite(magnitude))


def _finite(number: Any) -> int | float:
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError(f"found {str(number)[:80]}, expected a finite number")
    return number


def replay(image: Image.Image, augmentation: Augmentation, size: int, interpolation: Interpolation) -> Image.Image:
    """Carry an augmentation out.

    Args:
        image: 8-bit RGB.
        augmentation: its box lies inside the image.
        size: side of the result, pixels. Magnitudes in pixels (shifts) are taken as they are.
        interpolation: interpolation of the crop; the operations take the nearest pixel, and black from outside, as
            recorded ones do.
    """
    image = F.resized_crop(image, *augmentation.box, [size, size], InterpolationMode(interpolation))
    for operation in augmentation.operations:
        if operation is not None:
            image = operate(image, OPERATIONS[operation[0]], operation[1])
    return image


def operate(image: Image.Image, name: str, magnitude: float) -> Image.Image:
    """Carry one operation of RandAugment out, pixel for pixel as torchvision does."""
    match name:
        case "Identity":
            return image
        case "ShearX" | "ShearY":
            angle = math.degrees(math.atan(magnitude))
            return _affine(image, shear=[angle, 0.0] if name == "ShearX" else [0.0, angle], center=[0.0, 0.0])
        case "TranslateX" | "TranslateY":
            shift = int(magnitude)
            return _affine(image, translate=[shift, 0] if name == "TranslateX" else [0, shift])
        case "Rotate":
            return F.rotate(image, magnitude)
        case "Brightness":
            return F.adjust_brightness(image, 1.0 + magnitude)
        case "Color":
            return F.adjust_saturation(image, 1.0 + magnitude)
        case "Contrast":
            return F.adjust_contrast(image, 1.0 + magnitude)
        case "Sharpness":
            return F.adjust_sharpness(image, 1.0 + magnitude)
        case "Posterize":
            return F.posterize(image, int(magnitude))
        case "Solarize":
            return F.solarize(image, magnitude)
        case "AutoContrast":
            return F.autocontrast(image)
        case "Equalize":
            return F.equalize(image)
    raise ValueError(f"found the operation {name!r}, expected one of {', '.join(OPERATIONS)}")


def _affine(
    image: Image.Image,
    translate: Sequence[int] = (0, 0),
    shear: Sequence[float] = (0.0, 0.0),
    center: list[float] | None = None,
) -> Image.Image:
    return F.affine(image, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=center)


class AugmentationDraw:
    """Draws augmentations as the released configuration does: a random resized crop, then RandAugment.

    Defaults are the released data sets' (bin 9 of 31, two operations, torchvision's crop).

    Args:
        size: side of the crops that the teachers see, pixels; shifts are shares of it.
        scale: smallest and largest share of the image's area in the crop.
        ratio: smallest and largest aspect ratio of the crop.
        num_ops: operations after the crop.
        magnitude: level of the operations, out of ``bins - 1``.
        bins: number of levels.
        operations: the pool.
    """

    def __init__(
        self,
        size: int = 224,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        num_ops: int = 2,
        magnitude: int = 9,
        bins: int = 31,
        operations: Sequence[str] = OPERATIONS,
    ) -> None:
        unknown = sorted(set(operations) - set(OPERATIONS))
        if unknown:
            raise ValueError(f"found operations {unknown}, expected some of {', '.join(OPERATIONS)}: correct the names")
        self.crop = v2.RandomResizedCrop(size, scale, ratio)
        self.num_ops = num_ops
        self.operations = [OPERATIONS.index(name) for name in operations]
        level = magnitude / (bins - 1)
        shift = 150 / 331 * size
        top = {"Shear": 0.3, "Translate": shift, "Rotate": 30.0}
        enhance = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9)
        limits = {
            name: limit for name in OPERATIONS for kind, limit in (top | enhance).items() if name.startswith(kind)
        }
        self.magnitudes = [level * limits.get(name, 0.0) for name in OPERATIONS]
        self.magnitudes[OPERATIONS.index("Posterize")] = float(8 - round(4 * level))
        self.magnitudes[OPERATIONS.index("Solarize")] = 255 * (1 - level)

    def __call__(self, height: int, width: int) -> Augmentation:
        """Draw one for an image of that size, from torch's CPU generator."""
        box = self.crop.make_params([torch.empty(3, height, width, device="meta")])
        operations = tuple(self._draw_operation() for _ in range(self.num_ops))
        return Augmentation(Box(box["top"], box["left"], box["height"], box["width"]), operations)

    def _draw_operation(self) -> tuple[int, float]:
        number = self.operations[int(torch.randint(len(self.operations), (1,)))]
        magnitude = self.magnitudes[number]
        if OPERATIONS[number] in _SIGNED and int(torch.randint(2, (1,))):
            magnitude = -magnitude
        return number, magnitude
