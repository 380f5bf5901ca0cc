"""Datamodule of image-caption pairs on disk or on the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE
from ..base.contract import LocksTowers, TokenizesForTeachers, asked_of
from ..base.faults import Collated, Outcome
from ..base.images import ImageTransforms
from ..base.sampled import RowLoaders, SampledDataModule
from ..base.samples import Reader, TrainingSet
from ..base.stages import Split, splits_of
from ..base.texts import TokenizedTexts
from ..reading.division import DividedSources
from ..reading.layout import Layout
from ..reading.open import Opening, PairSources
from ..reading.remote import RETRIES
from ..reading.stream import Stream
from ..reading.table import PairTable
from ..transforms.normalize import in_pixels
from .rows import CaptionRows
from .samples import (
    EvaluationCollate,
    EvaluationReader,
    EvaluationSet,
    PairReader,
    PairRows,
    ShortTexts,
    TrainingCollate,
)
from .source_arguments import SourceArguments
from .stored import (
    StoredEvaluationSet,
    StoredReader,
    StoredRows,
    StoredSet,
    check_preparation,
    features_as_they_are,
    open_stored,
)
from .streams import StreamLoaders


class PairDataModule(TokenizedTexts, ImageTransforms, SampledDataModule):
    """Image-caption pairs, in batches of the project's contract (dicts of tensors).

    Evaluation reads each image once, with all of its captions. A subclass defines the rows in `open_split`.
    """

    asks: ClassVar[tuple[type, ...]] = (TokenizesForTeachers,)

    short_texts: ShortTexts | None = None

    # Methods that the base class calls

    def training_reader(self, rows: PairRows) -> Reader:
        """Return a reader of an augmented image with one of its captions."""
        return PairReader(rows, self.worker_transform(training=True), self.encoder(), self.short_texts)

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
        """Stack the images and encode their captions, for teachers with other tokenizers too."""
        module = asked_of(self.trainer, TokenizesForTeachers)  # type: ignore[type-abstract]
        teachers = {} if module is None else module.teacher_tokenizers
        return TrainingCollate(self.encoder(), self.stored_widths("train"), self.short_texts is not None, teachers)

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

    def evaluation_collate(self, split: Split) -> EvaluationCollate:
        """Stack the images and encode all of their captions."""
        return EvaluationCollate(self.encoder(), in_pixels(self.eval_transform), self.stored_widths(split))

    def stored_widths(self, split: Split) -> dict[str, int]:
        """Return the widths of features that batches of a split have in place of what a tower encodes; mostly none."""
        return {}


class ImageTextDataModule(DividedSources, SourceArguments, PairDataModule):
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
        short_texts: gives each training sample a short text beside its caption, on which `CLIPModule` trains too
            (`model.loss.short_weight`): "sentence", the first sentence of the caption; "shortest", the shortest caption
            of the row, where one of the others is drawn.
        augmentation: changes of training images: "albef", as in that pre-training (crops of 20 to 100% of the area and
            RandAugment), or "crop", crops of 90 to 100%, for fine-tuning. Has no effect with `train_transform`.
        streaming: whether to stream all splits instead of memory-mapping a copy.
        samples_per_epoch: training rows per epoch, over all processes; required for streaming, where the number of rows
            is unknown.
        shuffle_block: least number of rows that are shuffled together in streaming, over all processes, which hold
            twice as many in memory; four global batches if that is more.
        store: folder of a store of the training rows, which `vlightning embed` wrote: features of towers that the
            module locks are read from it, and the towers do not run. Epoch e reads view e of an image. Or folders by
            the splits of their rows, such as `{train: stores/pairs, validation: stores/held_out}`; an evaluation or a
            prediction reads features of either tower, locked or not, by plain views.
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
        short_texts: ShortTexts | None = None,
        augmentation: Literal["albef", "crop"] = "albef",
        streaming: bool = False,
        samples_per_epoch: Annotated[int | None, COUNT] = None,
        shuffle_block: Annotated[int, COUNT] = 1024,
        store: str | dict[Split, str] | None = None,
        read_retries: Annotated[int, NOT_NEGATIVE] = RETRIES,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.sources = self.divided(self.sources)
        self.streaming = streaming
        self.samples_per_epoch = samples_per_epoch
        self.shuffle_block = shuffle_block
        self.augmentation = augmentation
        self.samples = samples
        self.short_texts = short_texts
        if short_texts == "shortest" and samples == "captions":
            raise UserError(
                "Expected data.samples: images with data.short_texts: shortest, got captions, each of which is a row "
                "of its own: set data.short_texts to sentence."
            )
        if streaming:
            self._check_streaming(bool(self.sources["train"]))
            if store is not None:
                raise UserError(
                    "Expected rows in random access with data.store, got data.streaming: leave out one of them."
                )
        self._store_folders = _by_split(store)
        self._stored: dict[Split, StoredRows] = {}
        columns = image_column, caption_column, image_id_column
        self.pairs = PairSources(
            self.sources,
            Opening(self.image_root, *columns, self.cache_dir, retries=read_retries),
            self.max_pixels,
            streaming,
            self.division,
        )

    def train_options(self) -> dict[str, Any]:
        """Return arguments of `ALBEFTrainTransform` for `augmentation`."""
        return {"scale": (0.9, 1.0), "rand_augment": False} if self.augmentation == "crop" else {}

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split, and convert their files; none with `streaming`, which reads the files."""
        return [] if self.streaming else self.pairs.open(split)

    def open_split(self, split: Split) -> PairTable | CaptionRows[PairTable] | Stream | None:
        """Open and check the rows of a split."""
        rows = self.pairs.rows(split, self.clean_captions, self.max_words, split not in self._store_folders)
        if split == "train" and self.samples == "captions" and isinstance(rows, PairTable):
            return CaptionRows(rows)
        return rows

    def setup(self, stage: str | None = None) -> None:
        """Open the splits of a stage, and check that each store is one of the rows of its split.

        Raises:
            UserError: If a split cannot be used, or a store is of other rows, images or texts.
        """
        super().setup(stage)
        if stage is None or self.trainer is None:
            return
        module = asked_of(self.trainer, LocksTowers)  # type: ignore[type-abstract]
        locked = None if module is None else module.locked_towers
        for split in splits_of(stage):
            rows = self.opened_rows(split)
            if rows is not None and (folder := self._store_folders.get(split)) is not None:
                table = rows.table if isinstance(rows, CaptionRows) else rows
                stored = open_stored(folder, split, table, locked, stage == "fit")
                if split == "train" and self.short_texts is not None and "text" in stored.towers:
                    raise UserError(
                        f"Expected a store of images with data.short_texts, which no store has, got features of texts "
                        f"in {folder}: leave data.short_texts out, or embed with --of images."
                    )
                check_preparation(stored, self.train_transform, self.eval_transform, self.encoder())
                self._stored[split] = stored

    @property
    def stored(self) -> dict[Split, dict[str, Any]]:
        """By split of the stage, model of the store, and fingerprints of the towers whose features batches hold."""
        splits = () if self.trainer is None else splits_of(self.trainer.state.fn)
        return {split: self._stored[split].record() for split in splits if split in self._stored}

    def stored_widths(self, split: Split) -> dict[str, int]:
        """Return the widths of the features that are read from the store of a split."""
        return self._stored[split].widths if split in self._stored else {}

    def training_set(self, rows: Any) -> TrainingSet:
        """Return the dataset of training samples, with features from the store if there is one."""
        if "train" not in self._stored:
            return super().training_set(rows)
        transform = self.worker_transform(training=True)
        read = StoredReader(rows, transform, self.encoder(), self._stored["train"], self.short_texts)
        return StoredSet(len(rows), read, self.run_seed)

    def evaluation_set(self, rows: Any, items: list[list[int]], split: Split) -> EvaluationSet:
        """Return a dataset of images with all of their captions, with features from the store if there is one."""
        if split not in self._stored:
            return super().evaluation_set(rows, items, split)
        reader = self.evaluation_reader(split)
        if "image" in self._stored[split].towers:
            reader = dataclasses.replace(reader, transform=features_as_they_are)
        return StoredEvaluationSet(rows, items, reader, self._stored[split])

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
        if self.division is not None:
            raise UserError(
                "Expected no data.split with data.streaming, which does not know the rows, got both: leave out one of "
                "them."
            )
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
        if self.limit_eval_rows is not None:
            raise UserError(
                f"Expected no data.limit_eval_rows with data.streaming, which does not know the numbers of rows, got "
                f"{self.limit_eval_rows}: set trainer.limit_val_batches, or set data.streaming to false."
            )


def _by_split(store: str | Mapping[Split, str] | None) -> dict[Split, str]:
    """Return the folder of the store of each split; one folder is that of the training rows.

    Raises:
        UserError: If there is no such split.
    """
    if store is None:
        return {}
    folders: dict[Split, str] = {"train": store} if isinstance(store, str) else dict(store)
    if unknown := [split for split in folders if split not in get_args(Split)]:
        raise UserError(f"Expected {', '.join(get_args(Split))} in data.store, got {unknown[0]!r}: correct the name.")
    return folders
