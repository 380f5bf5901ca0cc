"""Datamodule of texts that refer to boxes of images, and of texts with images alone for training."""

from __future__ import annotations

from typing import Any, ClassVar

from ..base.stages import Split
from ..pairs.datamodule import PairDataModule
from ..pairs.rows import CaptionRows
from ..pairs.source_arguments import SourceArguments
from ..reading.layout import Layout
from ..reading.open import Opening, PairSources
from ..reading.table import PairTable
from .rows import BoxRows, Refer, read_columns, read_proposals
from .samples import GroundingBatches, check_boxes


class GroundingDataModule(SourceArguments, GroundingBatches, PairDataModule):
    """Images with texts in training, and texts with the boxes that they refer to in evaluation.

    Sources are lists in JSON, JSON lines or CSV, or Parquet. A row of training has an image and a text, or a list of
    texts. A row of evaluation also has its boxes, (x, y, width, height) in pixels: `boxes`, the candidates, and
    `box`, the right one, by default the first of the candidates; or, with `refer`, a `ref_id`. A text without
    usable boxes is a bad row. In training images are resized, never cropped, and flipped although the texts tell left
    from right, as by the authors of ALBEF.

    Args:
        refer: folder of RefCOCO's annotations, with `refs(unc).p` and `instances.json`. The pickled file is read as
            plain data, without running code. The results of each split in the annotations are reported.
        proposals: JSON file of candidate boxes by image, such as MAttNet's `dets.json`; by default the candidates are
            those of the rows, or all annotated boxes of the image in `refer`.
        image_column: column of the images.
        text_column: column of the texts.
        rand_augment: whether to apply ALBEF's RandAugment in training.
    """

    default_image_size: ClassVar[int | None] = 256

    def __init__(
        self,
        *,
        refer: str | None = None,
        proposals: str | None = None,
        image_column: str = "image",
        text_column: str = "text",
        rand_augment: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.refer = refer
        self.proposals = proposals
        self.rand_augment = rand_augment
        opening = Opening(self.image_root, image_column, text_column, None, self.cache_dir)
        self.pairs = PairSources(self.sources, opening, self.max_pixels)

    def train_options(self) -> dict[str, Any]:
        """Return arguments of `ALBEFTrainTransform`: a resize to a square instead of the crop."""
        return {"rand_augment": self.rand_augment, "scale": None}

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

        def read(row: int) -> None:
            image = rows.image(row)
            check_boxes(rows.target(row), (image.height, image.width), rows.name(row), split != "predict")

        images.check_rows(split, "texts with boxes", "check the columns, data.refer and data.proposals", read)
        return rows
