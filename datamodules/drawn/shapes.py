"""Scenes of two colored shapes: their content, their captions, and how they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from ...common.errors import UserError
from ..base.sampling import generator
from ..base.stages import Split

SIZES = {"small": 0.095, "large": 0.17}  # radius as a share of the image's side
COLORS = {
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
OVERSAMPLING = 2  # shapes are drawn at twice the size and averaged, for smooth edges

JITTER = 16  # random numbers of an image

_TRAIN, _VALIDATION, _TEST, _COMBINATIONS = range(4)
_STREAMS: dict[Split, int] = {"train": _TRAIN, "validation": _VALIDATION, "test": _TEST, "predict": _TEST}


class Thing(NamedTuple):
    """An object of a scene."""

    size: str
    color: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.size} {self.color} {self.shape}"


class Scene(NamedTuple):
    """Two different objects and the relation of the first to the second."""

    first: Thing
    second: Thing
    relation: str

    def __str__(self) -> str:
        return f"{self.first} {self.relation} {self.second}"


THINGS = [Thing(size, color, shape) for size in SIZES for color in COLORS for shape in SHAPES]


def _named_first(one: int, other: int) -> tuple[int, int]:
    """Return two objects in the order in which a caption names them.

    "A left of B" and "B right of A" describe the same image, so only one of these texts may be its caption. Each object
    is named before about half of the others.
    """
    ahead = (other - one) % len(THINGS)
    half = len(THINGS) // 2
    return (one, other) if ahead < half or (ahead == half and one < other) else (other, one)


PAIRS = [_named_first(one, other) for one in range(len(THINGS)) for other in range(one + 1, len(THINGS))]


class ShapesTable:
    """Images of one split, drawn on access.

    Args:
        split: the split.
        length: number of training images.
        eval_length: number of images in the validation split, and in the test split; each image has another pair of
            objects, which occurs in no other split.
        image_size: side of the images, pixels.
        seed: seed of the images; an image is a function of the seed and of its index.

    Raises:
        UserError: If a length is out of its range.
    """

    def __init__(self, split: Split, length: int, eval_length: int, image_size: int, seed: int) -> None:
        available = len(PAIRS) - 2 * eval_length
        if available < 1:
            raise UserError(
                f"Expected data.eval_length from 1 to {(len(PAIRS) - 1) // 2}, got {eval_length}: "
                f"correct it, since training needs some of the {len(PAIRS)} pairs of objects."
            )
        self._stream = _STREAMS[split]
        self._length = eval_length if split != "train" else length
        self._evaluates = split != "train"
        self._image_size = image_size
        self._seed = seed
        start = {_VALIDATION: 0, _TEST: eval_length, _TRAIN: 2 * eval_length}[self._stream]
        stop = len(PAIRS) if self._stream == _TRAIN else start + eval_length
        self._pairs = generator(_COMBINATIONS, seed).permutation(len(PAIRS))[start:stop]

    def __len__(self) -> int:
        return self._length

    def scene(self, row: int) -> Scene:
        """Return the scene of an image."""
        draws = generator(self._stream, self._seed, row, 0)
        pair = self._pairs[row] if self._evaluates else draws.choice(self._pairs)
        first, second = PAIRS[pair]
        return Scene(THINGS[first], THINGS[second], RELATIONS[draws.integers(len(RELATIONS))])

    def image(self, row: int) -> Image.Image:
        """Draw an image: RGB, `image_size` pixels square."""
        return draw(self.scene(row), self._image_size, generator(self._stream, self._seed, row, 1))

    def captions(self, row: int) -> list[str]:
        """Return the caption of an image in a list."""
        return [str(self.scene(row))]

    def image_id(self, row: int) -> int:
        """Return the row, since each row has its own image."""
        return row

    def name(self, row: int) -> str:
        """Return the name of an image in messages."""
        return f"shape image {row}"

    def image_name(self, row: int) -> str:
        """Return the name of the image in messages, since it is not a file."""
        return self.name(row)

    def images(self) -> list[list[int]]:
        """Return one row per image."""
        return [[row] for row in range(len(self))]

    def texts(self) -> Iterator[str]:
        """Yield texts with each word in each position; they suffice to train a tokenizer."""
        for thing in THINGS:
            for relation in RELATIONS:
                yield f"{thing} {relation} {thing}"


class TextTable:
    """Rows of texts about drawn images, functions of (seed, split, index); a base class."""

    def __init__(self, split: Split, length: int, eval_length: int, image_size: int, seed: int) -> None:
        self._shapes = ShapesTable(split, length, eval_length, image_size, seed)
        self._side = image_size
        self._draws = (_STREAMS[split], seed)

    def __len__(self) -> int:
        return len(self._shapes)

    def texts(self) -> Iterator[str]:
        """Yield the texts that the tokenizer of captions is trained on, so that token ids are those of that model."""
        return self._shapes.texts()


def draw(scene: Scene, image_size: int, draws: np.random.Generator) -> Image.Image:
    """Draw a scene with jitter in position, size, color and background.

    The jitter is small: relation, sizes and colors remain recognizable, and a crop of 90% of the area contains both
    objects.
    """
    side = image_size * OVERSAMPLING
    jitter = draws.uniform(-1, 1, size=JITTER)
    grey = round(GREY + 16 * jitter[0])
    image = Image.new("RGB", (side, side), (grey, grey, grey))
    canvas = ImageDraw.Draw(image)
    for number, (thing, (x, y, radius)) in enumerate(zip(scene[:2], positions(scene, jitter), strict=True)):
        shade = 10 * jitter[7 + 3 * number : 10 + 3 * number]
        color = tuple(int(value) for value in np.clip(np.add(COLORS[thing.color], shade), 0, 255))
        draw_shape(canvas, thing.shape, x * side, y * side, radius * side, color)
    return image.reduce(OVERSAMPLING)


def positions(scene: Scene, jitter: np.ndarray) -> list[tuple[float, float, float]]:
    """Return the center (x, y) and the radius of both objects as shares of the image's side.

    Args:
        scene: the scene.
        jitter: the first `JITTER` draws of the image, from -1 to 1.
    """
    near = 0.27 + 0.025 * jitter[1]
    far = 0.73 + 0.025 * jitter[2]
    across = 0.5 + 0.1 * jitter[3:5]
    along = (near, far) if scene.relation in ("to the left of", "above") else (far, near)
    sideways = scene.relation in ("to the left of", "to the right of")
    circles = []
    for number, thing in enumerate((scene.first, scene.second)):
        center = (along[number], across[number]) if sideways else (across[number], along[number])
        circles.append((*center, SIZES[thing.size] * (1 + 0.06 * jitter[5 + number])))
    return circles


def draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, color: tuple[int, ...]
) -> None:
    """Draw one shape with its center at (x, y), pixels."""
    box = (x - radius, y - radius, x + radius, y + radius)
    match shape:
        case "circle":
            canvas.ellipse(box, fill=color)
        case "ring":
            canvas.ellipse(box, outline=color, width=max(1, round(radius * 0.4)))
        case "square":
            half = radius * 0.88
            canvas.rectangle((x - half, y - half, x + half, y + half), fill=color)
        case "triangle":
            canvas.polygon(
                [(x, y - radius), (x - radius, y + radius * 0.8), (x + radius, y + radius * 0.8)], fill=color
            )
        case "cross":
            arm = radius * 0.33
            canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=color)
            canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=color)
