"""Questions about generated colored shapes, for a first run without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from PIL import Image

from ..base.sampling import generator
from ..base.stages import Split
from ..questions.datamodule import QuestionDataModule
from .pairs import DrawnShapes
from .shapes import COLORS, SHAPES, TextTable, Thing

_PLAN = 20  # beside the draws of `ShapesTable`
COUNTS = ("none", "one", "two")
ANSWERS = (*COLORS, *SHAPES, "yes", "no", *COUNTS)


class Asked(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


class ShapeQuestionTable(TextTable):
    """Questions about images of two shapes, of four kinds.

    "what color is the ring?" and "what shape is red?" have one answer in the image, or a count is asked instead; "how
    many circles?" has none, one or two; of "is there a red ring?", half and some more are true, the others
    differ from an object in color or in shape.

    Args:
        split: as in `ShapesTable`, like the next four; evaluation asks four questions about each image.
        per_image: number of questions about a training image. A single one is of a random kind; of several, each is of
            the next kind.
    """

    def __init__(
        self, split: Split, length: int, eval_length: int, image_size: int, seed: int, per_image: int = 1
    ) -> None:
        super().__init__(split, length, eval_length, image_size, seed)
        self._per_image = per_image if split == "train" else 4

    def __len__(self) -> int:
        return len(self._shapes) * self._per_image

    def _image_of(self, row: int) -> int:
        return row // self._per_image

    def asked(self, row: int) -> Asked:
        """Return the question of a row and its answer."""
        draws = generator(*self._draws, row, _PLAN)
        kind = row % 4 if self._per_image > 1 else int(draws.integers(4))
        scene = self._shapes.scene(self._image_of(row))
        things: tuple[Thing, Thing] = (scene.first, scene.second)
        thing, other = (things[number] for number in draws.permutation(2))
        if kind == 0 and things[0].shape != things[1].shape:
            return Asked(f"what color is the {thing.shape}?", thing.color)
        if kind == 1 and things[0].color != things[1].color:
            return Asked(f"what shape is {thing.color}?", thing.shape)
        if kind <= 2:
            absent = [shape for shape in SHAPES if shape not in (thing.shape, other.shape)]
            shape = thing.shape if draws.integers(2) else absent[draws.integers(len(absent))]
            plural = f"{shape}es" if shape == "cross" else f"{shape}s"
            return Asked(f"how many {plural}?", COUNTS[sum(each.shape == shape for each in things)])
        if draws.integers(2):
            return Asked(f"is there a {thing.color} {thing.shape}?", "yes")
        color = thing.color
        shape = thing.shape
        if draws.integers(2):
            color = list(COLORS)[draws.integers(len(COLORS))]
        else:
            shape = SHAPES[draws.integers(len(SHAPES))]
        there = any((each.color, each.shape) == (color, shape) for each in things)
        return Asked(f"is there a {color} {shape}?", "yes" if there else "no")

    def image(self, row: int) -> Image.Image:
        """Draw the image of a row: RGB, `image_size` pixels square."""
        return self._shapes.image(self._image_of(row))

    def question(self, row: int) -> str:
        """Return the question of a row."""
        return self.asked(row).question

    def answers(self, row: int) -> list[str]:
        """Return the answer of a row in a list."""
        return [self.asked(row).answer]

    def answer_weight(self, row: int) -> float | None:
        """Return None: an answer counts in full."""
        return None

    def question_id(self, row: int) -> str:
        """Return the row."""
        return str(row)

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""
        return f"question {row} on {self._shapes.name(self._image_of(row))}"

    def image_name(self, row: int) -> str:
        """Return the name of the image in messages, since it is not a file."""
        return self._shapes.name(self._image_of(row))

    def images(self) -> list[list[int]]:
        """Return the rows of each image."""
        size = self._per_image
        return [list(range(start, start + size)) for start in range(0, len(self), size)]


class ShapesVQADataModule(DrawnShapes, QuestionDataModule):
    """Questions about two colored shapes: their color, their shape, how many there are, whether there is one.

    A fixture for trials, not a benchmark. The images are those of `ShapesDataModule`, and so is the trained
    tokenizer, which spells the words that captions do not have. A training image has `questions_per_image` questions.

    Args:
        eval_length: number of images in the validation split, and in the test split, each with four questions.
    """

    def __init__(self, eval_length: int = 256, **options: Any) -> None:
        super().__init__(eval_length=eval_length, **options)

    @property
    def answers(self) -> Sequence[str]:
        """The answers that are ranked: colors, shapes, yes and no, numbers."""
        return ANSWERS

    def open_split(self, split: Split) -> ShapeQuestionTable:
        """Open the images of a split; `predict` is the test split."""
        return ShapeQuestionTable(split, *self.content, self.questions_per_image)
