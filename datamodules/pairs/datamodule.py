"""Datamodule of image-caption pairs on disk or on the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE
from ..base.contract import LocksTowers, asked_of
from ..base.faults import Collated, Outcome
from ..base.images import ImageTransforms
from ..base.sampled import RowLoaders, SampledDataModule
from ..base.samples import Reader, TrainingSet
from ..base.stages import Split
from ..base.texts import TokenizedTexts
from ..reading.layout import Layout
from ..reading.open import Opening, PairSources
from ..reading.remote import RETRIES
from ..reading.stream import Stream
from ..reading.table import PairTable
from ..stores.store import FeatureStore
from ..transforms.normalize import in_pixels
from .rows import CaptionRows
from .samples import EvaluationCollate, EvaluationReader, EvaluationSet, PairReader, PairRows, TrainingCollate
from .source_arguments import SourceArguments
from .stored import StoredCollate, StoredReader, StoredSet, check_preparation, check_rows, stored_towers
from .streams import StreamLoaders


class PairDataModule(TokenizedTexts, ImageTransforms, SampledDataModule):
    """Image-caption pairs, in batches of the project's contract (dicts of tensors).

    Evaluation reads each image once, with all of its captions. A subclass defines the rows in `open_split`.
    """

    # Methods that the base class calls

    def training_reader(self, rows: PairRows) -> Reader:
        """Return a reader of an augmented image with one of its captions."""
        return PairReader(rows, self.worker_transform(training=True), self.encoder())

    def captions(self, split: Split, sample_index: Sequence[int]) -> list[list[str]]:
        """Return the usable captions of evaluated images by `sample_index`, in the order of the evaluation.

        Raises:
            UserError: If the split is not set up, or is streamed.
        """
        rows = self._opened(split)
        self.row_loaders.check_random_access(split, "captions")
        usable = self.encoder().usable
        groups = {group[0]: group for group in rows.images()}
        return [
            [text for row in groups[index] for text in rows.captions(row) if usable(text)] for index in sample_index
        ]

    def training_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """Stack the images and encode their captions."""
        return TrainingCollate(self.encoder())

    def evaluation_items(self, rows: PairRows) -> list[list[int]]:
        """Return the rows of each image."""
        return rows.images()

    def evaluation_set(self, rows: PairRows, items: list[list[int]], split: Split) -> EvaluationSet:
        """Return a dataset of images with all of their captions."""
        return EvaluationSet(rows, items, self.evaluation_reader(split))

    def evaluation_reader(self, split: Split) -> EvaluationReader:
        """Return a reader of an image with all of its captions, of which prediction needs none."""
        transform = self.worker_transform(training=False)
        return EvaluationReader(transform, self.encoder(), self.run_seed, split != "predict")

    def evaluation_collate(self) -> EvaluationCollate:
        """Stack the images and encode all of their captions."""
        return EvaluationCollate(self.encoder(), in_pixels(self.eval_transform))


class ImageTextDataModule(SourceArguments, PairDataModule):
    """Image-caption pairs from Parquet, JSON, CSV, image folders, WebDataset shards or the hub, on disks or by URL.

    Files are `.parquet`; `.json` in ALBEF's form (a list of objects), `.jsonl`, `.csv`; `.tar` in WebDataset's form;
    `dataset_coco.json` and `dataset_flickr30k.json` with Karpathy's splits, of which each argument reads its own.
    Folders are of such files, of images with a `metadata.jsonl` (key `file_name`), or saved by `datasets`. Sources are
    also hub names, and URLs of Parquet, JSON, CSV and tar files, such as `s3://bucket/pairs/*.tar`. `predict`
    also reads image files that are named directly.

    Args:
        image_column: column of the images (encoded, or paths).
        caption_column: column of the captions, each a string or a list of strings. Training draws one of them,
            evaluation uses all.
        image_id_column: column whose equal values identify the same image; by default `image_id` if it exists, else
            the image's path.
        samples: whether a training row is an image, for which one of its captions is drawn, or a caption: an image with
            five captions is then five rows of an epoch.
        augmentation: changes of training images: "albef", as in that pre-training (crops of 20 to 100% of the area and
            RandAugment), or "crop", crops of 90 to 100%, for fine-tuning. Has no effect with `train_transform`.
        streaming: whether to stream all splits instead of memory-mapping a copy.
        samples_per_epoch: training rows per epoch, over all processes; required for streaming, where the number of rows
            is unknown.
        shuffle_block: number of rows that are shuffled together in streaming; each loader worker holds as many rows in
            memory.
        store: folder of a store of the training rows, which `vlightning embed` wrote: features of towers that the
            module locks are read from it, and the towers do not run. Epoch e reads view e of an image.
        read_retries: number of times that a failed read of a file by URL is tried again, after waits that double from
            half a second. A row that still cannot be read is an unusable sample; a table or shard ends the run.
    """

    default_image_size: ClassVar[int | None] = 256

    def __init__(
        self,
        *,
        image_column: str = "image",
        caption_column: str = "caption",
        image_id_column: str | None = None,
        samples: Literal["images", "captions"] = "images",
        augmentation: Literal["albef", "crop"] = "albef",
        streaming: bool = False,
        samples_per_epoch: Annotated[int | None, COUNT] = None,
        shuffle_block: Annotated[int, COUNT] = 1024,
        store: str | None = None,
        read_retries: Annotated[int, NOT_NEGATIVE] = RETRIES,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.streaming = streaming
        self.samples_per_epoch = samples_per_epoch
        self.shuffle_block = shuffle_block
        self.augmentation = augmentation
        self.samples = samples
        if streaming:
            self._check_streaming(bool(self.sources["train"]))
            if store is not None:
                raise UserError(
                    "Expected rows in random access with data.store, got data.streaming: leave out one of them."
                )
        self._store_folder = store
        self.store: FeatureStore | None = None  # opened for a fit, as evaluation needs none
        self._towers: list[str] = []  # whose features are read from the store
        columns = image_column, caption_column, image_id_column
        self.pairs = PairSources(
            self.sources,
            Opening(self.image_root, *columns, self.cache_dir, retries=read_retries),
            self.max_pixels,
            streaming,
        )

    def train_options(self) -> dict[str, Any]:
        """Return arguments of `ALBEFTrainTransform` for `augmentation`."""
        return {"scale": (0.9, 1.0), "rand_augment": False} if self.augmentation == "crop" else {}

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split, and convert their files; none with `streaming`, which reads the files."""
        return [] if self.streaming else self.pairs.open(split)

    def open_split(self, split: Split) -> PairTable | CaptionRows[PairTable] | Stream | None:
        """Open and check the rows of a split."""
        rows = self.pairs.rows(split, self.clean_captions, self.max_words)
        if split == "train" and self.samples == "captions" and isinstance(rows, PairTable):
            return CaptionRows(rows)
        return rows

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and check that the store is one of the training rows.

        Raises:
            UserError: If a split cannot be used, or the store is of other rows, images or texts.
        """
        super().setup(stage)
        rows = self.opened_rows("train")
        if self._store_folder is None or stage != "fit" or rows is None:
            return
        self.store = FeatureStore(self._store_folder)
        module = asked_of(self.trainer, LocksTowers)  # type: ignore[type-abstract]
        self._towers = stored_towers(self.store, [] if module is None else module.locked_towers)
        check_rows(self.store, rows.table if isinstance(rows, CaptionRows) else rows)
        check_preparation(self.store, self._towers, self.train_transform, self.eval_transform, self.encoder())

    @property
    def stored(self) -> dict[str, Any] | None:
        """Model of the store, and fingerprints of the towers whose features batches hold; None without a store."""
        if self.store is None or not self._towers:
            return None
        model = self.store.manifest["model"]
        return {"model": model["name"], "towers": {tower: model[tower] for tower in self._towers}}

    def training_set(self, rows: Any) -> TrainingSet:
        """Return the dataset of training samples, with features from the store if there is one."""
        if self.store is None:
            return super().training_set(rows)
        read = StoredReader(rows, self.worker_transform(training=True), self.encoder(), self.store, self._towers)
        return StoredSet(len(rows), read, self.run_seed)

    def training_collate(self) -> Callable[[Sequence[Outcome]], Collated]:
        """Stack the images or their features, and encode their captions."""
        return super().training_collate() if self.store is None else StoredCollate(self.encoder(), self._towers)

    @property
    def row_loaders(self) -> RowLoaders:
        """The loaders of memory-mapped rows, or with `streaming` those of streams."""
        if self.streaming:
            return StreamLoaders(self, self.samples_per_epoch or 0, self.shuffle_block)
        return RowLoaders(self)

    def _check_streaming(self, trains: bool) -> None:
        """Check the options that `streaming`, which does not know the numbers of rows, needs or excludes.

        Raises:
            UserError: If an option does not fit.
        """
        if trains and self.samples_per_epoch is None:
            raise UserError(
                "Expected data.samples_per_epoch with data.streaming, got none: set it to the number of training rows "
                "that make an epoch."
            )
        if trains and self.samples == "captions":
            raise UserError(
                "Expected data.samples: images with data.streaming, got captions: set data.streaming to false, or give "
                "a source with five captions for each image a weight of 5."
            )
        if self.mixing_temperature != 1:
            raise UserError(
                f"Expected data.mixing_temperature 1 with data.streaming, which does not know the numbers of rows, got "
                f"{self.mixing_temperature:g}: give the sources weights, or set data.streaming to false."
            )
        if self.limit_eval_rows is not None:
            raise UserError(
                f"Expected no data.limit_eval_rows with data.streaming, which does not know the numbers of rows, got "
                f"{self.limit_eval_rows}: set trainer.limit_val_batches, or set data.streaming to false."
            )
