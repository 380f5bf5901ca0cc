"""Rows of generated images whose texts name one of the two objects, with boxes."""

from __future__ import annotations

from PIL import Image

from ..base.sampling import generator
from ..grounding.samples import Target
from .shapes import JITTER, ShapesTable, places


class PhraseTable(ShapesTable):
    """Images of `ShapesTable`; in training with the phrases of both objects, of which one is drawn."""

    def captions(self, row: int) -> list[str]:
        """Return the phrases of both objects."""
        return [str(thing) for thing in self.scene(row)[:2]]


class PhraseRows(PhraseTable):
    """Phrases of an evaluation split, two for each image, with boxes.

    The candidates are the boxes of both objects, and two of the same sizes that contain no object: where the objects
    would be if the image were mirrored along its diagonal. So a box drawn at random is right for 25% of the phrases,
    and a map that finds objects but does not read the phrase for 50%.
    """

    def __len__(self) -> int:
        return 2 * super().__len__()

    def captions(self, row: int) -> list[str]:
        """Return the phrase in a list."""
        return super().captions(row // 2)[row % 2 : row % 2 + 1]

    def image(self, row: int) -> Image.Image:
        """Draw the image of a phrase: RGB, `image_size` pixels square."""
        return super().image(row // 2)

    def image_id(self, row: int) -> int:
        """Return the index of the image."""
        return row // 2

    def name(self, row: int) -> str:
        """Return the name of a phrase in messages."""
        return f"shape image {row // 2}, phrase {row % 2}"

    def images(self) -> list[list[int]]:
        """Return the phrases of each image."""
        return [[row, row + 1] for row in range(0, len(self), 2)]

    def target(self, row: int) -> Target:
        """Return the boxes of a phrase."""
        scene, side = self.scene(row // 2), self._image_size
        jitter = generator(self._stream, self._seed, row // 2, 1).uniform(-1, 1, size=JITTER)
        objects = [
            (x * side - radius * side, y * side - radius * side, 2 * radius * side, 2 * radius * side)
            for x, y, radius in places(scene, jitter)
        ]
        empty = [(top, left, width, height) for left, top, width, height in objects]
        return Target([*objects, *empty], objects[row % 2])
