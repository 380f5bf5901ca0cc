"""Datamodule of texts that refer to boxes of images, and of texts with images alone for training."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from torch import nn

from ...common.ranges import COUNT
from ..base.decode import MAX_PIXELS
from ..base.faults import BadSample, Fault
from ..base.stages import Split
from ..pairs.datamodule import PairDataModule
from ..pairs.rows import CaptionRows
from ..reading.layout import Layout
from ..reading.open import Opening, PairSources
from ..reading.resolve import Sources, by_split
from ..reading.table import PairTable
from ..transforms.clip import pair_train_transform
from .rows import BoxRows, Refer, read_columns, read_proposals
from .samples import GroundingBatches, check_boxes


class GroundingDataModule(GroundingBatches, PairDataModule):
    """Images with texts in training, and texts with the boxes that they refer to in evaluation.

    Sources are lists in JSON, JSON lines or CSV, or Parquet. A row of training has an image and a text, or a list of
    texts. A row of evaluation also has its boxes, (x, y, width, height) in pixels: `boxes`, the candidates, and
    `box`, the right one, by default the first of the candidates; or, with `refer`, a `ref_id`. A text without
    usable boxes is a bad row.

    Args:
        train: training rows.
        validation: rows for validation. With `refer`, the results of each split in the annotations are reported.
        test: rows for testing.
        predict: rows for prediction; the right boxes are not needed.
        refer: folder of RefCOCO's annotations, with `refs(unc).p` and `instances.json`. The pickled file is read as
            plain data, without running code.
        proposals: JSON file of candidate boxes by image, such as MAttNet's `dets.json`; by default the candidates are
            those of the rows, or all annotated boxes of the image in `refer`.
        image_root: folder that relative image paths start from; by default the folder of the file that names them.
        image_column: column of the images.
        text_column: column of the texts.
        image_size: side of the square images, pixels; by default that of the module, or else 256 (ALBEF).
        horizontal_flip: whether to flip half of the training images, as the authors of ALBEF do, although the texts
            tell left from right.
        rand_augment: whether to apply ALBEF's RandAugment in training. Images are resized, never cropped.
        max_pixels: images with more pixels are refused before they are decoded.
        cache_dir: folder for the memory-mapped copies of the `datasets` library.
    """

    default_image_size: ClassVar[int | None] = 256

    def __init__(
        self,
        train: Sources = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        refer: str | None = None,
        proposals: str | None = None,
        image_root: str | None = None,
        image_column: str = "image",
        text_column: str = "text",
        image_size: Annotated[int | None, COUNT] = None,
        horizontal_flip: bool = True,
        rand_augment: bool = True,
        max_pixels: Annotated[int, COUNT] = MAX_PIXELS,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.refer = refer
        self.proposals = proposals
        self.horizontal_flip = horizontal_flip
        self.rand_augment = rand_augment
        self.image_size = image_size
        self.pairs = PairSources(
            by_split(train, validation, test, predict),
            Opening(image_root, image_column, text_column, None, cache_dir),
            max_pixels,
        )

    def default_train_transform(self) -> nn.Module:
        """Return ALBEF's training transform with a resize to a square instead of the crop."""
        flip = 0.5 if self.horizontal_flip else 0.0
        options = {"horizontal_flip": flip, "rand_augment": self.rand_augment, "scale": None}
        return pair_train_transform(self.image_size, self.expected_preprocessing(), **options)

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split; return each with its layout."""
        return self.pairs.open(split)

    def open_split(self, split: Split) -> CaptionRows[PairTable] | BoxRows | None:
        """Open and check the rows of a split.

        Raises:
            UserError: If a source cannot be opened, or no row has usable boxes.
        """
        images = self.pairs.rows(split, self.clean_captions, self.max_words)
        if not isinstance(images, PairTable):
            return None
        if split == "train":
            return CaptionRows(images)
        columns = [values for source in self.pairs.sources[split] for values in read_columns(source)]
        refer = None if self.refer is None else Refer(self.refer)
        proposals = None if self.proposals is None else read_proposals(self.proposals)
        rows = BoxRows(images, columns, refer, proposals)

        def unusable(row: int) -> Fault | None:
            try:
                image = rows.image(row)
                check_boxes(rows.target(row), (image.height, image.width), rows.name(row), split != "predict")
            except BadSample as bad:
                return bad.fault
            return None

        images.check_rows(split, "texts with boxes", "check the columns, data.refer and data.proposals", unusable)
        return rows
