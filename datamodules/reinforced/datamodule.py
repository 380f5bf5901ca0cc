"""Datamodules of reinforced pairs: image-caption pairs with the stored embeddings of teachers, as in DataCompDR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from torch import nn

from ...common.clip_vocabulary import CLIP, CLIP_TOKENS, CLIP_VOCABULARY
from ...common.preprocessing import Interpolation, Three
from ...common.ranges import COUNT, FINITE, POSITIVE, SHARE, CheckedArguments
from ..base.decode import MAX_PIXELS
from ..base.stages import Split
from ..pairs.datamodule import PairDataModule
from ..reading.cache import index_cache
from ..reading.open import Opening, PairSources
from ..reading.resolve import Sources, by_split
from ..reading.shards import SeparateImages, Shards, find_shards, teachers_of
from ..reading.stream import Stream
from ..reading.table import PairTable
from ..reading.tar import IMAGE_SUFFIXES
from ..transforms.albef import pair_eval_transform
from ..transforms.clip import ReplayTransform
from .rows import OtherSizes, ReinforcedTable
from .samples import ReinforcedCollate, ReinforcedDraws, ReinforcedReader, ReinforcedSet

TeacherDtype = Literal["float32", "bfloat16"]
_IMAGE_ARGUMENTS = ("mean", "std", "interpolation")
"""Keys of the preprocessing that are arguments with the prefix `image_`."""


class ReinforcedBatches(CheckedArguments, pl.LightningDataModule):
    """Training on reinforced pairs, with the preprocessing that the student expects; a base class before the pairs.

    Captions are encoded by CLIP's tokenizer.

    Args:
        image_size: side of the square images, pixels (MobileCLIP: 256; its ViTs: 224).
        image_mean: mean of each channel, on the 0-1 scale; by default the mean that the module's weights expect, else 0
            (MobileCLIP's S and B models).
        image_std: standard deviation of each channel, on the 0-1 scale; by default the value that those weights expect,
            else 1 (MobileCLIP's S and B models).
        image_interpolation: interpolation of the crops in training and of the resize in evaluation; by default the
            interpolation that those weights expect, else bilinear (MobileCLIP).
        max_tokens: length of the token sequences, which is the model's context length (CLIP: 77).
        teacher_dtype: data type of the teachers' embeddings in a batch; "bfloat16" halves the traffic between
            processes, and is exact if the data is stored in bfloat16.
        batch_size: training pairs per process and batch (released scripts: 65,536 in all).
        first_augmentations: only the first this many stored augmentations of an image are used (the paper's ablation of
            their number); by default all.
        first_synthetic: only the first this many synthetic captions, of each kind, are used (as before).
        sequential: whether epoch e uses augmentation and synthetic caption number e, modulo their counts, instead of
            random ones.
        synthetic_ratio: probability that a sample trains on its synthetic caption instead of the real one (the paper's
            ablation of random choice; `mix-synthetic-ratio` of the released code); by default it trains on both. The
            text tower then encodes one caption for each image. The module treats and logs these captions as real ones.
    """

    text_options: ClassVar[dict[str, Any]] = {
        "tokenizer": CLIP,
        "vocab_size": CLIP_VOCABULARY,
        "append_sep": True,
        "clean_captions": False,
        "max_words": CLIP_TOKENS,
    }
    """Arguments of other datamodules that are fixed here; the command line encodes new texts by them."""
    decided_arguments: ClassVar[tuple[str, ...]] = (*text_options, "train_transform", "eval_transform")

    # Members of `PairDataModule`
    _rows: dict[Split, Any]
    image_size: Any
    run_seed: int
    encoder: Callable[[], Any]
    expected_preprocessing: Callable[[], Mapping[str, Any]]
    worker_transform: Callable[..., nn.Module]

    def __init__(
        self,
        *,
        image_size: Annotated[int, COUNT] = 256,
        image_mean: Annotated[Three | None, FINITE] = None,
        image_std: Annotated[Three | None, POSITIVE] = None,
        image_interpolation: Interpolation | None = None,
        max_tokens: int = CLIP_TOKENS,
        teacher_dtype: TeacherDtype = "float32",
        batch_size: int = 256,
        first_augmentations: Annotated[int | None, COUNT] = None,
        first_synthetic: Annotated[int | None, COUNT] = None,
        sequential: bool = False,
        synthetic_ratio: Annotated[float | None, SHARE] = None,
        **options: Any,
    ) -> None:
        super().__init__(
            # By name, or the command line would take them for arguments of this class.
            tokenizer=self.text_options["tokenizer"],
            vocab_size=self.text_options["vocab_size"],
            max_tokens=max_tokens,
            append_sep=self.text_options["append_sep"],
            clean_captions=self.text_options["clean_captions"],
            max_words=self.text_options["max_words"],
            train_transform=None,
            eval_transform=None,
            batch_size=batch_size,
            **options,
        )
        self.image_size = image_size
        self.image_mean = image_mean
        self.image_std = image_std
        self.image_interpolation = image_interpolation
        self.teacher_dtype = teacher_dtype
        self.draws = ReinforcedDraws(first_augmentations, first_synthetic, sequential, synthetic_ratio)

    @property
    def teacher_width(self) -> int | None:
        """Dimension of the teachers' concatenated embeddings; None before training rows are opened."""
        return self._rows["train"].teacher_width if "train" in self._rows else None

    @property
    def teachers(self) -> dict[str, Any] | None:
        """Dimension (`dims`) and logit scale (`scales`) of each teacher, and their file (`source`); or None."""
        return None

    def default_train_transform(self) -> ReplayTransform:
        """Return the transform that replays recorded augmentations, with the normalization of evaluation."""
        settings = self._image_settings(self.expected_preprocessing())
        return ReplayTransform(self.image_size, **{name: settings[name] for name in _IMAGE_ARGUMENTS})

    def default_eval_transform(self) -> nn.Module:
        """Return the transform with the given values, else those that trained weights expect, else MobileCLIP's."""
        return pair_eval_transform(self.image_size, self._image_settings(self.expected_preprocessing()))

    def _image_settings(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return interpolation and normalization of the images."""
        defaults = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "interpolation": "bilinear"}
        given = {name: getattr(self, f"image_{name}") for name in _IMAGE_ARGUMENTS}
        return {**defaults, **expected, **{name: value for name, value in given.items() if value is not None}}

    def check_rows(self, rows: ReinforcedTable, split: Split) -> None:
        """Check that a sample can be used, and set the dimension of the teachers' embeddings from it.

        Raises:
            UserError: If the split is empty, or no probed sample can be used.
        """
        read = self.training_reader(rows)
        rows.check(split, lambda row: len(read(row, (0, 0)).teacher_image))

    def training_reader(self, rows: Any) -> ReinforcedReader:
        """Return a reader of one recorded augmentation with its captions and embeddings."""
        return ReinforcedReader(rows, self.worker_transform(training=True), self.draws)

    def training_set(self, rows: Any) -> ReinforcedSet:
        """Return the dataset of training samples."""
        return ReinforcedSet(len(rows), self.training_reader(rows), self.run_seed)

    def training_collate(self) -> ReinforcedCollate:
        """Stack the images and embeddings, and encode both captions."""
        return ReinforcedCollate(self.encoder(), getattr(torch, self.teacher_dtype))


class ReinforcedDataModule(ReinforcedBatches, PairDataModule):
    """Reinforced pairs for training, plain pairs for evaluation.

    A subclass opens the rows: those of reinforced shards for training, pairs for all other splits.
    """


class ReinforcedImageTextDataModule(ReinforcedBatches, PairDataModule):
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
        self.check_rows(rows, split)
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
