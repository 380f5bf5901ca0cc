"""Drawing, recording and replaying of the augmentations of a reinforced dataset.

The format is that of DataCompDR: a crop, which is a box in pixels of the original image, and two operations of
RandAugment, each of which is an index into `OPERATIONS` and a signed magnitude. (Reinforcement: arXiv 2303.08983;
MobileCLIP: arXiv 2311.17049.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from ...common.errors import UserError
from ...common.preprocessing import Interpolation

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
"""Operations of RandAugment by index, in the order of torchvision."""
_SIGNED = OPERATIONS[1:10]


class Box(NamedTuple):
    """A crop, pixels."""

    top: int
    left: int
    height: int
    width: int

    def fits(self, height: int, width: int) -> bool:
        """Return whether the box lies inside an image with this height and width."""
        return (
            self.top >= 0
            and self.left >= 0
            and self.height > 0
            and self.width > 0
            and self.top + self.height <= height
            and self.left + self.width <= width
        )

    def rescaled(self, recorded: tuple[int, int], actual: tuple[int, int]) -> Box:
        """Return the box that covers the same area of a copy of the image with another size.

        Args:
            recorded: height and width of the image in which the box is measured.
            actual: height and width of the copy.
        """
        down, across = (new / old for new, old in zip(actual, recorded, strict=True))
        top = min(round(self.top * down), actual[0] - 1)
        left = min(round(self.left * across), actual[1] - 1)
        bottom = round((self.top + self.height) * down)
        right = round((self.left + self.width) * across)
        return Box(top, left, max(min(bottom, actual[0]) - top, 1), max(min(right, actual[1]) - left, 1))


class Augmentation(NamedTuple):
    """A crop and the operations after it; None stands for a skipped operation."""

    box: Box
    operations: tuple[tuple[int, float] | None, ...]

    def as_json(self) -> list[Any]:
        """Return the augmentation as an entry of `param_aug`."""
        return [list(self.box), [None if operation is None else list(operation) for operation in self.operations]]


def augmentation_entries(value: Any) -> list[Any]:
    """Return the unparsed augmentations of the entry `param_aug`: a list, or a string with the list as JSON.

    The published shards hold a list; the viewer and the loader of the hub convert it to a string.

    Raises:
        ValueError: If the entry has another form.
    """
    entries = json.loads(value) if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"Expected a list of augmentations as param_aug, got {type(entries).__name__}.")
    return entries


def parse_augmentation(entry: Any) -> Augmentation:
    """Parse one augmentation of `param_aug`.

    Raises:
        ValueError: If the entry has another form.
    """
    try:
        box, operations = entry
        parsed = tuple(None if operation is None else _operation(*operation) for operation in operations)
        return Augmentation(Box(*(int(_finite(side)) for side in box)), parsed)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "Expected [[top, left, height, width], [[operation, magnitude], ...]] in param_aug, got "
            f"{str(entry)[:80]!r}."
        ) from error


def _operation(number: Any, magnitude: Any) -> tuple[int, float]:
    if not 0 <= _finite(number) < len(OPERATIONS) or number != int(number):
        raise ValueError(f"Expected an operation from 0 to {len(OPERATIONS) - 1}, got {number}.")
    if OPERATIONS[int(number)] == "Posterize" and not 1 <= _finite(magnitude) <= 8:
        raise ValueError(f"Expected 1 to 8 bits for Posterize, got {magnitude}.")
    return int(number), float(_finite(magnitude))


def _finite(number: Any) -> int | float:
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError(f"Expected a finite number, got {str(number)[:80]}.")
    return number


def replay(image: Image.Image, augmentation: Augmentation, size: int, interpolation: Interpolation) -> Image.Image:
    """Replay an augmentation.

    Args:
        image: 8-bit RGB image.
        augmentation: the augmentation; its box lies inside the image.
        size: side of the result, pixels. Magnitudes in pixels (translations) are not rescaled.
        interpolation: interpolation of the crop; the operations use the nearest pixel and fill with black, as in the
            recording.
    """
    image = F.resized_crop(image, *augmentation.box, [size, size], InterpolationMode(interpolation))
    for operation in augmentation.operations:
        if operation is not None:
            image = operate(image, OPERATIONS[operation[0]], operation[1])
    return image


def operate(image: Image.Image, name: str, magnitude: float) -> Image.Image:
    """Apply one operation of RandAugment, with the same pixels as torchvision's."""
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
    raise ValueError(f"Expected an operation among {', '.join(OPERATIONS)}, got {name!r}.")


def _affine(
    image: Image.Image,
    translate: Sequence[int] = (0, 0),
    shear: Sequence[float] = (0.0, 0.0),
    center: list[float] | None = None,
) -> Image.Image:
    return F.affine(image, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=center)


class AugmentationDraw:
    """Draw augmentations as in the released configuration: a random resized crop, then RandAugment.

    The defaults are those of the released datasets (bin 9 of 31, two operations, torchvision's crop).

    Args:
        size: side of the teachers' crops, pixels; translations are shares of it.
        scale: smallest and largest share of the image's area in the crop.
        ratio: smallest and largest aspect ratio of the crop.
        num_ops: number of operations after the crop.
        magnitude: level of the operations, at most `bins - 1`.
        bins: number of levels.
        operations: operations to draw from.

    Raises:
        UserError: If an operation is unknown.
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
            raise UserError(f"Expected operations among {', '.join(OPERATIONS)}, got {unknown}: correct the names.")
        self.crop = v2.RandomResizedCrop(size, scale, ratio)
        self.num_ops = num_ops
        self.operations = [OPERATIONS.index(name) for name in operations]
        level = magnitude / (bins - 1)
        limits = {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0}
        limits |= dict.fromkeys(("TranslateX", "TranslateY"), 150 / 331 * size)
        limits |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9)
        self.magnitudes = [level * limits.get(name, 0.0) for name in OPERATIONS]
        self.magnitudes[OPERATIONS.index("Posterize")] = float(8 - round(4 * level))
        self.magnitudes[OPERATIONS.index("Solarize")] = 255 * (1 - level)

    def __call__(self, height: int, width: int) -> Augmentation:
        """Draw an augmentation for an image with this height and width, from torch's CPU generator."""
        box = self.crop.make_params([torch.empty(3, height, width, device="meta")])
        operations = tuple(self._draw_operation() for _ in range(self.num_ops))
        return Augmentation(Box(box["top"], box["left"], box["height"], box["width"]), operations)

    def _draw_operation(self) -> tuple[int, float]:
        number = self.operations[int(torch.randint(len(self.operations), (1,)))]
        magnitude = self.magnitudes[number]
        if OPERATIONS[number] in _SIGNED and int(torch.randint(2, (1,))):
            magnitude = -magnitude
        return number, magnitude
