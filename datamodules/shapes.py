"""Coloured shapes drawn on the fly, so that a first run needs no download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import nn

from .core.base import Split
from .core.sampling import generator
from .pairs import PairDataModule
from .transforms.clip import pair_eval_transform, pair_train_transform

SIZES = {"small": 0.095, "large": 0.17}  # radius, as a share of the side
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 75, 215),
    "yellow": (240, 220, 50),
    "purple": (150, 50, 190),
    "cyan": (60, 205, 220),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
RELATIONS = ("to the left of", "to the right of", "above", "below")
GREY = 128
OVERSAMPLING = 2  # shapes are drawn at twice the size and averaged down, for smooth edges

_TRAIN, _VALIDATION, _TEST, _COMBINATIONS = range(4)


class Thing(NamedTuple):
    """One object of a scene."""

    size: str
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape}"


class Scene(NamedTuple):
    """Two different objects and where the first is, seen from the second."""

    first: Thing
    second: Thing
    relation: str

    def __str__(self) -> str:
        return f"{self.first} {self.relation} {self.second}"


THINGS = [Thing(size, colour, shape) for size in SIZES for colour in COLOURS for shape in SHAPES]


def _named_first(one: int, other: int) -> tuple[int, int]:
    """Which of two objects the caption names first.

    "A left of B" and "B right of A" describe the same image; only one of them may be its caption. Each object is
    named first with about half of the others.
    """
    ahead = (other - one) % len(THINGS)
    half = len(THINGS) // 2
    return (one, other) if ahead < half or (ahead == half and one < other) else (other, one)


PAIRS = [_named_first(one, other) for one in range(len(THINGS)) for other in range(one + 1, len(THINGS))]


class ShapesTable:
    """The scenes of one split, drawn when asked for.

    Args:
        split: which split.
        length: number of images in a training or prediction split.
        eval_length: number of images in the validation split, and in the test split: each of them holds as many
            different combinations of objects, which occur nowhere else.
        image_size: side of the images, pixels.
        seed: the images are a function of it and of their number.
    """

    def __init__(self, split: Split, length: int, eval_length: int, image_size: int, seed: int) -> None:
        available = len(PAIRS) - 2 * eval_length
        if eval_length < 1 or available < 1:
            raise ValueError(
                f"found eval_length={eval_length}, expected 1 to {(len(PAIRS) - 1) // 2}: there are {len(PAIRS)} "
                "combinations, and training needs some too"
            )
        if length < 1:
            raise ValueError(f"found length={length}, expected at least 1 training image: raise it")
        self._evaluates = split in ("validation", "test")
        self._stream = {"train": _TRAIN, "validation": _VALIDATION, "test": _TEST, "predict": _TEST}[split]
        self._length = eval_length if split != "train" else length
        self._evaluates = split != "train"
        self._image_size = image_size
        self._seed = seed
        first = {_VALIDATION: 0, _TEST: eval_length, _TRAIN: 2 * eval_length}[self._stream]
        last = len(PAIRS) if self._stream == _TRAIN else first + eval_length
        self._pairs = generator(_COMBINATIONS, seed).permutation(len(PAIRS))[first:last]

    def __len__(self) -> int:
        return self._length

    def scene(self, row: int) -> Scene:
        """What an image shows."""
        draws = generator(self._stream, self._seed, row, 0)
        pair = self._pairs[row] if self._evaluates else draws.choice(self._pairs)
        first, second = PAIRS[pair]
        return Scene(THINGS[first], THINGS[second], RELATIONS[draws.integers(len(RELATIONS))])

    def image(self, row: int) -> Image.Image:
        """Draw an image: RGB, ``image_size`` pixels square."""
        return draw(self.scene(row), self._image_size, generator(self._stream, self._seed, row, 1))

    def captions(self, row: int) -> list[str]:
        """The one caption of an image."""
        return [str(self.scene(row))]

    def image_id(self, row: int) -> int:
        """Each image is its own."""
        return row

    def name(self, row: int) -> str:
        """What messages call an image."""
        return f"shape image {row}"

    def picture_name(self, row: int) -> str:
        """The same: there is no file."""
        return self.name(row)

    def images(self) -> list[list[int]]:
        """One row an image."""
        return [[row] for row in range(len(self))]

    def texts(self) -> Iterator[str]:
        """Each word in its place: enough to train a tokenizer on."""
        for thing in THINGS:
            for relation in RELATIONS:
                yield f"{thing} {relation} {thing}"


def draw(scene: Scene, image_size: int, draws: np.random.Generator) -> Image.Image:
    """Draw a scene with jitter in place, size, colour and background.

    The jitter is small enough that the relation, the sizes and the colours stay plain, and that a crop of 90% of the
    area cuts nothing off.
    """
    side = image_size * OVERSAMPLING
    jitter = draws.uniform(-1, 1, size=16)
    grey = round(GREY + 16 * jitter[0])
    image = Image.new("RGB", (side, side), (grey, grey, grey))
    canvas = ImageDraw.Draw(image)
    near, far = 0.27 + 0.025 * jitter[1], 0.73 + 0.025 * jitter[2]
    across = 0.5 + 0.1 * jitter[3:5]
    along = (near, far) if scene.relation in ("to the left of", "above") else (far, near)
    sideways = scene.relation in ("to the left of", "to the right of")
    for number, thing in enumerate((scene.first, scene.second)):
        place = (along[number], across[number]) if sideways else (across[number], along[number])
        radius = SIZES[thing.size] * (1 + 0.06 * jitter[5 + number]) * side
        shade = 10 * jitter[7 + 3 * number : 10 + 3 * number]
        colour = tuple(int(value) for value in np.clip(np.add(COLOURS[thing.colour], shade), 0, 255))
        draw_shape(canvas, thing.shape, place[0] * side, place[1] * side, radius, colour)
    return image.reduce(OVERSAMPLING)


def draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, colour: tuple[int, ...]
) -> None:
    """Draw one shape with its middle at (x, y), pixels."""
    box = (x - radius, y - radius, x + radius, y + radius)
    match shape:
        case "circle":
            canvas.ellipse(box, fill=colour)
        case "ring":
            canvas.ellipse(box, outline=colour, width=max(1, round(radius * 0.4)))
        case "square":
            half = radius * 0.88
            canvas.rectangle((x - half, y - half, x + half, y + half), fill=colour)
        case "triangle":
            canvas.polygon(
                [(x, y - radius), (x - radius, y + radius * 0.8), (x + radius, y + radius * 0.8)], fill=colour
            )
        case "cross":
            arm = radius * 0.33
            canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
            canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)


class ShapesDataModule(PairDataModule):
    """Two coloured shapes and how they stand to each other: a fixture for trying things, not a benchmark.

    Captions read "a large red circle to the left of a small blue square": 80 objects (2 sizes, 8 colours, 5 shapes),
    3160 pairs of different objects, 4 relations, 12,640 captions in all, each the only one for its image. Validation
    and test show pairs of objects that occur in no other split; every single object occurs in training. An image is a
    function of (``data_seed``, split, number) alone.

    Args:
        batch_size: training images per process and batch.
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order and augmentation; by default Lightning's global seed, or 0 without one.
        length: number of training images in an epoch.
        eval_length: number of images in the validation split, and in the test split; so many different captions each.
        data_seed: seed of what the images show. Apart from ``seed``, so that runs with different seeds have one test
            split.
        image_size: side of the images, pixels.
        min_crop: smallest share of the image in a training crop; low values cut objects off.
        rand_augment: apply ALBEF's RandAugment in training. Off by default: a shift or a changed shade can make the
            caption wrong.
        train_transform: transform that takes the place of the crop, RandAugment and normalisation.
        eval_transform: transform that takes the place of the resize and normalisation.
        tokenizer: see :class:`ImageTextDataModule`; by default one is trained on the captions.
        vocab_size: largest number of tokenizer entries. The captions need about 250, of which 104 are reserved.
        max_tokens: longest token sequence, special tokens included.
        append_sep: end sequences with [SEP].
        max_bad_share: largest share of unusable samples; nothing is ever unusable here.
        predict_texts: see :class:`ImageTextDataModule`; prediction takes them beside the test split's images.
    """

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: int | None = None,
        length: int = 20_000,
        eval_length: int = 512,
        data_seed: int = 0,
        image_size: int = 64,
        min_crop: float = 0.9,
        rand_augment: bool = False,
        train_transform: nn.Module | None = None,
        eval_transform: nn.Module | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 320,
        max_tokens: int = 25,
        append_sep: bool = True,
        max_bad_share: float = 0.05,
        predict_texts: str | list[str] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            train_transform=train_transform,
            eval_transform=eval_transform,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            append_sep=append_sep,
            clean_captions=False,
            max_words=30,
            max_bad_share=max_bad_share,
            predict_texts=predict_texts,
        )
        self.length = length
        self.eval_length = eval_length
        self.data_seed = data_seed
        self.image_size = image_size
        self.min_crop = min_crop
        self.rand_augment = rand_augment
        self._record_hyperparameters()

    def default_train_transform(self) -> nn.Module:
        """Crop and, if asked for, RandAugment; normalised as trained weights expect it."""
        crop = {"scale": (self.min_crop, 1.0), "ratio": (1.0, 1.0), "horizontal_flip": 0.0}
        expected = self.expected_preprocessing()
        return pair_train_transform(self.image_size, expected, rand_augment=self.rand_augment, **crop)

    def default_eval_transform(self) -> nn.Module:
        """What trained weights expect, else ALBEF's."""
        return pair_eval_transform(self.image_size, self.expected_preprocessing())

    def open_split(self, split: Split) -> ShapesTable:
        """The images of a split; ``predict`` is the test split."""
        return ShapesTable(split, self.length, self.eval_length, self.image_size, self.data_seed)
