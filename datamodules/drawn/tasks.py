"""Generated colored shapes with texts to judge: entailment of a caption, statements about pairs of images.

The rows have the members of `TaskTable` that readers use. A row is a function of (seed, split, index).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from ..base.sampling import generator
from ..base.stages import Split
from ..tasks.datamodule import TaskDataModule
from .pairs import DrawnShapes
from .shapes import COLORS, RELATIONS, SHAPES, SIZES, THINGS, Scene, TextTable, Thing, draw

# Streams of draws, beside those of `ShapesTable`
_PLAN = 10
_LEFT = 11
_RIGHT = 12
PANEL = (70, 70, 70)


class Judged(NamedTuple):
    """A scene, a caption, and whether the image entails it."""

    scene: Scene
    caption: Scene
    covered: int | None  # 0 or 1: a panel hides the first or the second object
    label: int  # contradiction 0, neutral 1, entailment 2


class JudgedTable(TextTable):
    """Texts to judge about drawn images of one split."""

    def all_images(self, row: int) -> list[Image.Image]:
        """Draw the images of a row: RGB, `image_size` pixels square."""
        raise NotImplementedError

    def image(self, row: int) -> Image.Image:
        """Draw the first image of a row."""
        return self.all_images(row)[0]

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""
        return self._shapes.name(row)

    def image_name(self, row: int) -> str:
        """Return the name of the row, since its images are not files."""
        return self.name(row)


class ShapeEntailmentTable(JudgedTable):
    """Images of two shapes, of which a panel may hide one, with a caption.

    A true caption of an image without a panel is entailed. A caption with a wrong size, color or shape of a visible
    object is contradicted, with and without a panel. With a panel, a caption that is right about the visible object is
    neutral. A third of the rows each.
    """

    def judged(self, row: int) -> Judged:
        """Return the content of a row."""
        draws = generator(*self._draws, row, _PLAN)
        scene = self._shapes.scene(row)
        label = int(draws.integers(3))
        covered = int(draws.integers(2)) if label == 1 or (label == 0 and draws.integers(2)) else None
        if label != 0:
            return Judged(scene, scene, covered, label)
        visible = 1 - covered if covered is not None else int(draws.integers(2))
        things = [scene.first, scene.second]
        things[visible] = changed(things[visible], draws)
        return Judged(scene, Scene(things[0], things[1], scene.relation), covered, label)

    def all_images(self, row: int) -> list[Image.Image]:
        """Draw the image of a row: RGB, `image_size` pixels square."""
        judged = self.judged(row)
        image = draw(judged.scene, self._side, generator(*self._draws, row, _LEFT))
        if judged.covered is not None:
            _cover(image, judged.scene.relation, judged.covered)
        return [image]

    def text(self, row: int) -> str:
        """Return the caption of a row."""
        return str(self.judged(row).caption)

    def label(self, row: int) -> int:
        """Return contradiction 0, neutral 1 or entailment 2."""
        return self.judged(row).label

    def all_image_names(self, row: int) -> list[str]:
        """Return the name of the image of a row."""
        return [self.name(row)]


def changed(thing: Thing, draws: np.random.Generator) -> Thing:
    """Return an object with another size, color or shape."""
    attributes: list[tuple[str, Iterable[str]]] = [("size", SIZES), ("color", COLORS), ("shape", SHAPES)]
    attribute, values = attributes[draws.integers(3)]
    others = [value for value in values if value != getattr(thing, attribute)]
    return thing._replace(**{attribute: others[draws.integers(len(others))]})


def _cover(image: Image.Image, relation: str, covered: int) -> None:
    """Hide the first (0) or the second (1) object by a panel over its half of the image."""
    near = (relation in ("to the left of", "above")) == (covered == 0)
    side = image.width
    half = side / 2
    start = 0.0 if near else half
    end = half if near else float(side)
    sideways = relation in ("to the left of", "to the right of")
    box = (start, 0, end - 1, side - 1) if sideways else (0, start, side - 1, end - 1)
    ImageDraw.Draw(image).rectangle(box, fill=PANEL)


class Compared(NamedTuple):
    """Two scenes, a statement about an object in them, and whether it is true."""

    left: Scene
    right: Scene
    statement: str
    label: int


_CLAIMS = {
    "a {} in the left image": lambda left, right: left,
    "a {} in the right image": lambda left, right: right,
    "a {} in both images": lambda left, right: left and right,
}
"""Statements, and whether they are true of images of which the left and the right show an object."""


class ShapePairTable(JudgedTable):
    """Two images of two shapes each, with a statement about an object in the left, the right, or both images.

    The object is drawn in the left image, the right, both or none, such that half of the statements are true, and every
    wrong statement about one image is true of the other in half of the cases. Objects that are not meant differ in
    color or in shape.
    """

    def compared(self, row: int) -> Compared:
        """Return the content of a row."""
        draws = generator(*self._draws, row, _PLAN)
        thing = THINGS[draws.integers(len(THINGS))]
        label = int(draws.integers(2))
        form, holds = list(_CLAIMS.items())[draws.integers(len(_CLAIMS))]
        cases = [sides for sides in np.ndindex(2, 2) if bool(holds(*sides)) == bool(label)]
        left, right = cases[draws.integers(len(cases))]
        statement = form.format(f"{thing.color} {thing.shape}")
        return Compared(_scene(thing, bool(left), draws), _scene(thing, bool(right), draws), statement, label)

    def all_images(self, row: int) -> list[Image.Image]:
        """Draw the images of a row: RGB, `image_size` pixels square."""
        compared = self.compared(row)
        return [
            draw(scene, self._side, generator(*self._draws, row, stream))
            for scene, stream in ((compared.left, _LEFT), (compared.right, _RIGHT))
        ]

    def text(self, row: int) -> str:
        """Return the statement of a row."""
        return self.compared(row).statement

    def label(self, row: int) -> int:
        """Return 1 for a true statement, else 0."""
        return self.compared(row).label

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""
        return f"pair of shape images {row}"

    def all_image_names(self, row: int) -> list[str]:
        """Return the names of the images of a row."""
        return [f"{self.name(row)}, {side}" for side in ("left", "right")]


def _scene(thing: Thing, shown: bool, draws: np.random.Generator) -> Scene:
    """Return a scene with an object, or without any of its color and shape."""
    others = [each for each in THINGS if (each.color, each.shape) != (thing.color, thing.shape)]
    objects = [others[index] for index in draws.choice(len(others), 2, replace=False)]
    if shown:
        objects[draws.integers(2)] = thing
    return Scene(objects[0], objects[1], RELATIONS[draws.integers(len(RELATIONS))])


class ShapesEntailmentDataModule(DrawnShapes, TaskDataModule):
    """Captions that an image of two shapes, of which a panel may hide one, entails, contradicts, or leaves open.

    A fixture for trials, not a benchmark. Chance is 33.3%, also from the caption alone; a model that only sees whether
    there is a panel gets 66.7%.
    """

    class_names = ("contradiction", "neutral", "entailment")

    def open_split(self, split: Split) -> ShapeEntailmentTable:
        """Open the images of a split; `predict` is the test split."""
        return ShapeEntailmentTable(split, *self.content)


class ShapesNLVR2DataModule(DrawnShapes, TaskDataModule):
    """Statements such as "a red ring in the left image", true or false, about two images of two shapes each.

    A fixture for trials, not a benchmark. Chance is 50%, also from the statement or from the images alone.
    """

    image_names = ("image_left", "image_right")
    class_names = ("False", "True")

    def open_split(self, split: Split) -> ShapePairTable:
        """Open the images of a split; `predict` is the test split."""
        return ShapePairTable(split, *self.content)
