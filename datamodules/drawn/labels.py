"""Datamodule of generated colored shapes with classes, for a first distillation without a download."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw

from ...common.ranges import COUNT, NOT_NEGATIVE, SEED
from ..base.sampling import generator
from ..base.stages import Split
from ..labels.datamodule import LabelDataModule
from .shapes import COLORS, GREY, OVERSAMPLING, SHAPES, draw_shape

CLASSES = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
PALETTE = list(COLORS.values())
_STREAMS = {"train": 10, "validation": 11, "test": 12, "predict": 12}


class ShapeClassTable:
    """Images of one split, drawn on access.

    Args:
        split: the split.
        length: number of images.
        image_size: side of the images, pixels.
        seed: seed of the images; an image is a function of the seed and of its index.
        noise: standard deviation of the pixel noise, on the 0-255 scale.
    """

    def __init__(self, split: Split, length: int, image_size: int, seed: int, noise: float) -> None:
        self._stream = _STREAMS[split]
        self._length = length
        self._image_size = image_size
        self._seed = seed
        self._noise = noise

    def __len__(self) -> int:
        return self._length

    def label(self, row: int) -> int:
        """Return the class index; all classes are equally frequent."""
        return row % len(CLASSES)

    def image(self, row: int) -> Image.Image:
        """Draw an image: RGB, `image_size` pixels square."""
        draws = generator(self._stream, self._seed, row)
        side = self._image_size * OVERSAMPLING
        image = Image.new("RGB", (side, side), (GREY, GREY, GREY))
        canvas = ImageDraw.Draw(image)
        for _ in range(3):  # lines in other colors, behind the object
            ends = draws.uniform(0, side, size=4).tolist()
            canvas.line(ends, fill=_shade(PALETTE[draws.integers(len(COLORS))], draws), width=side // 16)
        color, shape = divmod(self.label(row), len(SHAPES))
        radius = side * draws.uniform(0.12, 0.3)
        x, y = draws.uniform(radius, side - radius, size=2)
        draw_shape(canvas, SHAPES[shape], x, y, radius, _shade(PALETTE[color], draws))
        pixels = np.asarray(image.reduce(OVERSAMPLING), dtype=np.float64)
        noisy = pixels + draws.normal(0, self._noise, pixels.shape)
        return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))

    def name(self, row: int) -> str:
        """Return the name of an image in messages."""
        return f"shape image {row}"

    def image_name(self, row: int) -> str:
        """Return the name of the image in messages, since it is not a file."""
        return self.name(row)


def _shade(color: tuple[int, int, int], draws: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(value) for value in np.clip(np.add(color, draws.normal(0, 20, 3)), 0, 255))


class ShapeClassesDataModule(LabelDataModule):
    """One colored shape on a noisy background: a fixture for trials, not a benchmark.

    40 classes, 8 colors of 5 shapes, equally frequent. An image is a function of (`data_seed`, split, index) only.
    The transforms are CIFAR's.

    Args:
        length: number of training images in an epoch.
        eval_length: number of images in the validation split, and in the test split.
        data_seed: seed of the content of the images. Separate from `seed`, so that runs with different seeds have the
            same test split.
        image_size: side of the images, pixels.
        noise: standard deviation of the pixel noise, on the 0-255 scale. Without noise a small network classifies all
            images correctly.
        num_workers: loader workers per process.
    """

    decided_arguments: ClassVar[tuple[str, ...]] = ("preset",)

    def __init__(
        self,
        length: Annotated[int, COUNT] = 4000,
        eval_length: Annotated[int, COUNT] = 1000,
        data_seed: Annotated[int, SEED] = 0,
        image_size: Annotated[int, COUNT] = 32,
        noise: Annotated[float, NOT_NEGATIVE] = 60,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(preset="cifar", image_size=image_size, num_workers=num_workers, **options)
        self.length = length
        self.eval_length = eval_length
        self.data_seed = data_seed
        self.image_size = image_size
        self.noise = noise

    @property
    def num_classes(self) -> int:
        """Number of classes: colors times shapes."""
        return len(CLASSES)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by index, such as "red circle"."""
        return tuple(CLASSES)

    def open_split(self, split: Split) -> ShapeClassTable:
        """Open the images of a split; `predict` is the test split."""
        length = self.length if split == "train" else self.eval_length
        return ShapeClassTable(split, length, self.image_size, self.data_seed, self.noise)
