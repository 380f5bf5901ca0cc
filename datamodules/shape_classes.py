"""Coloured shapes with a class each, drawn on the fly, so that a first distillation needs no download."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw
from torch import nn

from .core.base import Split
from .core.sampling import generator
from .image_classification import LabelDataModule
from .shapes import COLOURS, GREY, OVERSAMPLING, SHAPES, draw_shape

CLASSES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
PALETTE = list(COLOURS.values())
_STREAMS = {"train": 10, "validation": 11, "test": 12, "predict": 12}


class ShapeClassTable:
    """The images of one split, drawn when asked for.

    Args:
        split: which split.
        length: number of images.
        image_size: side of the images, pixels.
        seed: the images are a function of it and of their number.
        noise: deviation of the pixels, of 255.
    """

    def __init__(self, split: Split, length: int, image_size: int, seed: int, noise: float) -> None:
        if length < 1:
            raise ValueError(f"found {length} images for the {split} split, expected at least 1: raise the number")
        if noise < 0:
            raise ValueError(f"found noise {noise}, expected a deviation of at least 0 (of 255)")
        self._stream = _STREAMS[split]
        self._length = length
        self._image_size = image_size
        self._seed = seed
        self._noise = noise

    def __len__(self) -> int:
        return self._length

    def label(self, row: int) -> int:
        """Number of the class; all come equally often."""
        return row % len(CLASSES)

    def image(self, row: int) -> Image.Image:
        """Draw an image: RGB, ``image_size`` pixels square."""
        draws = generator(self._stream, self._seed, row)
        side = self._image_size * OVERSAMPLING
        image = Image.new("RGB", (side, side), (GREY, GREY, GREY))
        canvas = ImageDraw.Draw(image)
        for _ in range(3):  # strokes in other colours, before and under the object
            ends = draws.uniform(0, side, size=4).tolist()
            canvas.line(
                ends, fill=_shade(list(COLOURS.values())[draws.integers(len(COLOURS))], draws), width=side // 16
            )
        colour, shape = divmod(self.label(row), len(SHAPES))
        radius = side * draws.uniform(0.12, 0.3)
        x, y = draws.uniform(radius, side - radius, size=2)
        draw_shape(canvas, SHAPES[shape], x, y, radius, _shade(PALETTE[colour], draws))
        pixels = np.asarray(image.reduce(OVERSAMPLING), dtype=np.float64)
        noisy = pixels + draws.normal(0, self._noise, pixels.shape)
        return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))

    def name(self, row: int) -> str:
        """What messages call an image."""
        return f"shape image {row}"

    def picture_name(self, row: int) -> str:
        """The same: there is no file."""
        return self.name(row)


def _shade(colour: tuple[int, int, int], draws: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(value) for value in np.clip(np.add(colour, draws.normal(0, 20, 3)), 0, 255))


class ShapeClassesDataModule(LabelDataModule):
    """One coloured shape on a noisy ground: a fixture for trying things, not a benchmark.

    40 classes, 8 colours of 5 shapes, equally often. An image is a function of (``data_seed``, split, number) alone.

    Args:
        batch_size: training images per process and batch.
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order and augmentation; by default Lightning's global seed, or 0 without one.
        length: number of training images in an epoch.
        eval_length: number of images in the validation split, and in the test split.
        data_seed: seed of what the images show. Apart from ``seed``, so that runs with different seeds have one test
            split.
        image_size: side of the images, pixels.
        noise: deviation of the pixels, of 255. Without it a small network gets everything right.
        train_transform: transform that takes the place of CIFAR's in training.
        eval_transform: transform that takes the place of CIFAR's in evaluation.
        augment: False uses the evaluation transform in training too.
        views: see :class:`ImageClassificationDataModule`.
        max_bad_share: largest share of unusable samples; nothing is ever unusable here.
    """

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: int | None = None,
        length: int = 4000,
        eval_length: int = 1000,
        data_seed: int = 0,
        image_size: int = 32,
        noise: float = 60,
        train_transform: nn.Module | None = None,
        eval_transform: nn.Module | None = None,
        augment: bool = True,
        views: list[str] | None = None,
        max_bad_share: float = 0.05,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            preset="cifar",
            image_size=image_size,
            train_transform=train_transform,
            eval_transform=eval_transform,
            augment=augment,
            views=views,
            max_bad_share=max_bad_share,
        )
        self.length = length
        self.eval_length = eval_length
        self.data_seed = data_seed
        self.image_size = image_size
        self.noise = noise
        self._record_hyperparameters()

    @property
    def num_classes(self) -> int:
        """Colours times shapes."""
        return len(CLASSES)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by number, such as "red circle"."""
        return tuple(CLASSES)

    def open_split(self, split: Split) -> ShapeClassTable:
        """The images of a split; ``predict`` is the test split."""
        length = self.length if split == "train" else self.eval_length
        return ShapeClassTable(split, length, self.image_size, self.data_seed, self.noise)
