"""Generated shapes with phrases that name one of them, for a first run of grounding."""

from __future__ import annotations

from PIL import Image

from ..base.sampling import generator
from ..base.stages import Split
from ..grounding.samples import GroundingBatches, Target
from ..pairs.datamodule import PairDataModule
from .pairs import DrawnShapes
from .shapes import JITTER, ShapesTable, positions


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
        scene = self.scene(row // 2)
        side = self._image_size
        jitter = generator(self._stream, self._seed, row // 2, 1).uniform(-1, 1, size=JITTER)
        objects = [
            (x * side - radius * side, y * side - radius * side, 2 * radius * side, 2 * radius * side)
            for x, y, radius in positions(scene, jitter)
        ]
        empty = [(top, left, width, height) for left, top, width, height in objects]
        return Target([*objects, *empty], objects[row % 2])


class GroundingShapesDataModule(DrawnShapes, GroundingBatches, PairDataModule):
    """The images of `ShapesDataModule`, with phrases such as "a small blue square": a fixture for trials.

    Training images come with the phrase of one of their two objects, without a box. Evaluation has a phrase for each of
    the two objects and four candidate boxes: both objects, and two boxes without an object. A random box is right for
    25% of the phrases. `eval_length` counts images, each with two phrases.
    """

    def open_split(self, split: Split) -> PhraseTable:
        """Open the images of a split; `predict` is the test split."""
        table = PhraseTable if split == "train" else PhraseRows
        return table(split, *self.content)
