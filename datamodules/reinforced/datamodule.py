"""Datamodule of reinforced shards in the layout of DataCompDR."""

from __future__ import annotations

from typing import Annotated, Any

from ...common.ranges import COUNT
from ..base.decode import MAX_PIXELS
from ..base.stages import Split
from ..reading.cache import index_cache
from ..reading.open import Opening, PairSources
from ..reading.resolve import Sources, by_split
from ..reading.shards import SeparateImages, Shards, find_shards, teachers_of
from ..reading.stream import Stream
from ..reading.table import PairTable
from ..reading.tar import IMAGE_SUFFIXES
from .base import ReinforcedDataModule
from .reader import OtherSizes
from .rows import ReinforcedTable


class ReinforcedImageTextDataModule(ReinforcedDataModule):
    """Reinforced pairs in the layout of DataCompDR, versions 1 and 2; evaluation on pairs in any other form.

    A sample of a shard has the members `syn.json`, `paug.json` and `npz` or `pth.gz`; its image and its caption
    (`txt`) are in the shard as well, or in `images`. An epoch reads each sample once: one of its recorded
    augmentations, replayed at `image_size`, its caption, one of its synthetic captions, and the teachers' embeddings
    of these three. The choice is a function of (seed, epoch, sample), or with `sequential` of the epoch alone.

    The size of an image may differ from the size in which its boxes are measured. The entries `original_height` and
    `original_width` of `paug.json`, or else of the `json` that downloaders write, record the latter. Boxes are
    then rescaled, and the number of rescaled boxes is logged.

    Args:
        train: shards: a tar file, glob pattern or folder, or a list of these.
        images: folder of the images if they are not in the shards: tar files with the names of the shards, or files
            `<key>.jpg` or `<shard>/<key>.jpg`. Captions are read from this folder as well.
        validation: pairs for validation; see `ImageTextDataModule` for the forms.
        test: pairs for testing, in the same forms.
        predict: images for prediction; captions are optional.
        image_root: folder that relative image paths of evaluation pairs start from.
        image_column: column of the images of evaluation pairs.
        caption_column: column of the captions of evaluation pairs.
        image_id_column: column whose equal values identify the same image.
        synthetic_keys: regular expression; captions of `syn.json` are drawn if it matches their whole key. Version 2
            may hold captions of several captioners.
        other_sizes: treatment of images whose size differs from the recorded size: "rescale" rescales the boxes,
            "refuse" counts such samples as unusable, "ignore" measures boxes in pixels of the present images, for
            data that was reinforced after the download.
        max_pixels: images with more pixels are refused before they are decoded.
        cache_dir: folder of the cached indexes of shards, and of the copies of evaluation pairs; by default
            `~/.cache/vlightning`, and the `datasets` library's own folder.
        **options: see `ReinforcedDataModule`.
    """

    def __init__(
        self,
        train: str | list[str] | None = None,
        images: str | None = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        image_root: str | None = None,
        image_column: str = "image",
        caption_column: str = "caption",
        image_id_column: str | None = None,
        synthetic_keys: str = "syn_text.*",
        other_sizes: OtherSizes = "rescale",
        max_pixels: Annotated[int, COUNT] = MAX_PIXELS,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.shards = [train] if isinstance(train, str) else list(train or ())
        self.images = images
        self.synthetic_keys = synthetic_keys
        self.other_sizes: OtherSizes = other_sizes
        self.max_pixels = max_pixels
        self.cache = index_cache(cache_dir)
        self.pairs = PairSources(
            by_split(None, validation, test, predict),
            Opening(image_root, image_column, caption_column, image_id_column, cache_dir),
            max_pixels,
        )

    def prepare_data(self) -> None:
        """Index the shards, and convert evaluation pairs, once per node."""
        for split in self.splits_to_prepare():
            if split == "train" and self.shards:
                self._open_shards()
            else:
                self.pairs.open(split)

    def open_split(self, split: Split) -> ReinforcedTable | PairTable | Stream | None:
        """Open and check the rows of a split."""
        if split != "train":
            return self.pairs.rows(split, self.clean_captions, self.max_words)
        if not self.shards:
            return None
        shards, separate_images = self._open_shards()
        rows = ReinforcedTable(shards, separate_images, self.synthetic_keys, self.other_sizes, self.max_pixels)
        rows.check(split, self.training_reader(rows))
        return rows

    @property
    def teachers(self) -> dict[str, Any] | None:
        """The teachers in the manifests beside the shards; None without manifests, as with DataCompDR."""
        return teachers_of(find_shards(self.shards)) if self.shards else None

    def _open_shards(self) -> tuple[Shards, SeparateImages | None]:
        shards = Shards(find_shards(self.shards), self.cache)
        if self.images is None:
            return shards, None
        return shards, SeparateImages(self.images, shards, self.cache, IMAGE_SUFFIXES)
