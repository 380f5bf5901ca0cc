"""The datamodules over reinforced pairs: images and captions with what teachers said of them, kept beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .core.base import Split, splits_of
from .core.decode import MAX_PIXELS
from .core.samples import Collated, Outcome, account, stacked
from .image_text import PairSources, Sources, by_split
from .pairs import PairDataModule
from .sources.open import Opening
from .sources.records import IMAGE_SUFFIXES
from .sources.reinforced_rows import OtherSizes, ReinforcedReader, ReinforcedSample, ReinforcedTable
from .sources.stream import Stream
from .sources.table import PairTable
from .sources.tar import BesideShards, Shards, find_shards, index_cache, teachers_of
from .text.clip import CLIP, CLIP_TOKENS, CLIP_VOCABULARY
from .text.tokenizers import Encoder
from .transforms.clip import ReplayTransform, Three, pair_eval_transform
from .transforms.replay import Interpolation

TeacherDtype = Literal["float32", "bfloat16"]
_GIVEN = ("mean", "std", "interpolation")  # of what is done to an image, what has an argument


@dataclass
class ReinforcedCollate:
    """Training batches of the contract, with a second caption and the teachers' embeddings.

    Beside ``image``, ``input_ids``, ``attention_mask``, ``image_id`` and ``sample_index``: the synthetic caption as
    ``synthetic_input_ids`` and ``synthetic_attention_mask``, and of all teachers one after another ``teacher_image``,
    ``teacher_text`` and ``teacher_synthetic`` [B, D].

    Args:
        encoder: of the captions.
        dtype: of the embeddings.
    """

    encoder: Encoder
    dtype: torch.dtype

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images and the embeddings, and encode the captions."""
        found, seen, faults = account(outcomes)
        samples: list[ReinforcedSample] = found
        if len(samples) < len(outcomes):  # no substitute found either: the loader ends the run
            return Collated(None, seen, faults)
        texts = self.encoder([*(sample.caption for sample in samples), *(sample.synthetic for sample in samples)])
        index = torch.tensor([sample.sample_index for sample in samples])
        batch: dict[str, Any] = {
            "image": stacked([sample.image for sample in samples]),
            **{key: ids[: len(samples)] for key, ids in texts.items()},
            **{f"synthetic_{key}": ids[len(samples) :] for key, ids in texts.items()},
            **{
                key: stacked([getattr(sample, key).to(self.dtype) for sample in samples])
                for key in ("teacher_image", "teacher_text", "teacher_synthetic")
            },
            "image_id": index,
            "sample_index": index.clone(),
        }
        return Collated(batch, seen, faults, [note for sample in samples for note in sample.notes])


class ReinforcedDataModule(PairDataModule):
    """Reinforced pairs for training, plain pairs for evaluation; images as the student wants them.

    A subclass says where the rows are: a :class:`ReinforcedTable` for training, pairs for everything else.

    Args:
        batch_size: training pairs per process and batch.
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order and of the choice of augmentation and captions.
        image_size: side of the square images, pixels.
        image_mean: mean of each channel, on the 0-1 scale; None for what trained weights of the module expect, else 0.
        image_std: standard deviation of each channel, on the 0-1 scale; None for what those weights expect, else 1.
        image_interpolation: interpolation of the crops in training and of the resizing in evaluation; None for what
            those weights expect, else bilinear.
        max_tokens: length of the token sequences, which is the model's context.
        teacher_dtype: type in which the teachers' embeddings come.
        max_bad_share: largest share of unusable samples, of those read so far, with which a run goes on.
        predict_texts: texts for prediction, or a text file with one a line.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        persistent_workers: bool,
        pin_memory: bool | None,
        seed: int | None,
        image_size: int,
        image_mean: Three | None,
        image_std: Three | None,
        image_interpolation: Interpolation | None,
        max_tokens: int,
        teacher_dtype: TeacherDtype,
        max_bad_share: float,
        predict_texts: str | list[str] | None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            train_transform=None,
            eval_transform=None,
            tokenizer=CLIP,
            vocab_size=CLIP_VOCABULARY,
            max_tokens=max_tokens,
            append_sep=True,
            clean_captions=False,
            max_words=CLIP_TOKENS,
            max_bad_share=max_bad_share,
            predict_texts=predict_texts,
        )
        self.image_size = image_size
        self.image_mean = image_mean
        self.image_std = image_std
        self.image_interpolation = image_interpolation
        self.teacher_dtype = teacher_dtype

    @property
    def teacher_width(self) -> int | None:
        """Width of the teachers' embeddings, one after another; None before training rows are opened."""
        return self._rows["train"].teacher_width if "train" in self._rows else None

    @property
    def teachers(self) -> dict[str, Any] | None:
        """Width (``dims``) and scale (``scales``) of each teacher, and the file that says so (``source``); or None."""
        return None

    def default_train_transform(self) -> ReplayTransform:
        """Carries recorded augmentations out, for images as they are evaluated."""
        look = self._look(self.expected_preprocessing())
        return ReplayTransform(self.image_size, **{name: look[name] for name in _GIVEN})

    def default_eval_transform(self) -> nn.Module:
        """What was given, else what trained weights expect, else MobileCLIP's own."""
        return pair_eval_transform(self.image_size, self._look(self.expected_preprocessing()))

    def _look(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """How images are resized and normalised."""
        own = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "interpolation": "bilinear"}
        given = {name: getattr(self, f"image_{name}") for name in _GIVEN}
        return {**own, **expected, **{name: value for name, value in given.items() if value is not None}}

    def training_reader(self, rows: Any) -> ReinforcedReader:
        """Reads one recorded augmentation with its captions and embeddings."""
        transform = self.train_transform
        assert isinstance(transform, ReplayTransform)
        return ReinforcedReader(rows, transform)

    def training_collate(self) -> ReinforcedCollate:
        """Stacks images and embeddings, and encodes both captions."""
        return ReinforcedCollate(self.encoder(), getattr(torch, self.teacher_dtype))

    def check_training(self, rows: ReinforcedTable) -> ReinforcedTable:
        """The training rows, after some were tried."""
        rows.check("train", self.training_reader(rows))
        return rows


class ReinforcedImageTextDataModule(ReinforcedDataModule):
    """Reinforced pairs in the layout of DataCompDR, versions 1 and 2; evaluation on pairs in any other form.

    A sample of a shard has the members ``syn.json``, ``paug.json`` and ``npz`` or ``pth.gz``; its image and its
    caption (``txt``) stand there too, or beside it. An epoch reads each sample once: one of its recorded augmentations,
    carried out at ``image_size``, its caption, one of its synthetic captions, and the teachers' embeddings of these
    three. Which, is a function of (seed, epoch, sample).

    An image may have another size than the one that its boxes were measured on, which the entries
    ``original_height`` and ``original_width`` tell: of ``paug.json``, else of the ``json`` that downloaders write.
    Boxes are then rescaled, and their number is logged.

    Args:
        train: shards: a tar file, glob pattern or folder, or a list of these.
        images: folder of the images where they are not in the shards: tar files with the names of the shards, or
            files ``<key>.jpg`` or ``<shard>/<key>.jpg``. Captions are taken from there too.
        validation: pairs for validation; see :class:`ImageTextDataModule` for the forms.
        test: pairs for testing, in the same forms.
        predict: images for prediction; captions may be missing.
        predict_texts: texts for prediction, beside images or alone: a text file with one a line, or a list of texts.
        image_root: folder that relative image paths of evaluation pairs start from.
        image_column: column of the images of evaluation pairs.
        caption_column: column of their captions.
        image_id_column: column whose equal values mean the same image.
        synthetic_keys: pattern that the entries of ``syn.json`` to draw from match as a whole; version 2 may hold
            captions of several captioners.
        other_sizes: "rescale" adapts boxes to images of another size than the recorded one, "refuse" counts such
            samples as unusable, "ignore" takes boxes as pixels of the images at hand: for data that was reinforced
            after the download.
        batch_size: training pairs per process and batch (released scripts: 65,536 in all).
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order and of the choice of augmentation and captions; by default Lightning's global seed,
            or 0 without one. The value in a checkpoint wins when a run is resumed.
        image_size: side of the square images, pixels (MobileCLIP: 256; its ViTs: 224).
        image_mean: mean of each channel, on the 0-1 scale; by default what the module's weights expect, where they were
            trained before, else 0 (MobileCLIP's S and B models).
        image_std: standard deviation of each channel, on the 0-1 scale; by default what those weights expect, else 1
            (MobileCLIP's S and B models).
        image_interpolation: interpolation of the crops in training and of the resizing in evaluation; by default what
            those weights expect, else bilinear (MobileCLIP).
        max_tokens: length of the token sequences, which is the model's context (CLIP: 77).
        teacher_dtype: type in which the teachers' embeddings come: "bfloat16" halves what processes send each other,
            and loses nothing of data that is stored so.
        max_bad_share: largest share of unusable samples, of those read so far, with which a run goes on.
        max_pixels: images with more are refused before they are decoded.
        cache_dir: where the places of samples in shards are kept, and the copies of evaluation pairs; by default
            ``~/.cache/vlightning``, and the ``datasets`` library's own folder.
    """

    def __init__(
        self,
        train: str | list[str] | None = None,
        images: str | None = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        predict_texts: str | list[str] | None = None,
        image_root: str | None = None,
        image_column: str = "image",
        caption_column: str = "caption",
        image_id_column: str | None = None,
        synthetic_keys: str = "syn_text.*",
        other_sizes: OtherSizes = "rescale",
        batch_size: int = 256,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: int | None = None,
        image_size: int = 256,
        image_mean: Three | None = None,
        image_std: Three | None = None,
        image_interpolation: Interpolation | None = None,
        max_tokens: int = CLIP_TOKENS,
        teacher_dtype: TeacherDtype = "float32",
        max_bad_share: float = 0.05,
        max_pixels: int = MAX_PIXELS,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            image_size=image_size,
            image_mean=image_mean,
            image_std=image_std,
            image_interpolation=image_interpolation,
            max_tokens=max_tokens,
            teacher_dtype=teacher_dtype,
            max_bad_share=max_bad_share,
            predict_texts=predict_texts,
        )
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
        self._record_hyperparameters()

    def prepare_data(self) -> None:
        """Find the samples in the shards, and convert evaluation pairs, once per node."""
        for split in splits_of(self.trainer.state.fn if self.trainer is not None else None):
            if split == "train" and self.shards:
                self._open_shards()
            else:
                self.pairs.open(split)

    def open_split(self, split: Split) -> ReinforcedTable | PairTable | Stream | None:
        """The rows of a split, checked."""
        if split != "train":
            return self.pairs.rows(split, self.clean_captions, self.max_words)
        if not self.shards:
            return None
        shards, beside = self._open_shards()
        return self.check_training(
            ReinforcedTable(shards, beside, self.synthetic_keys, self.other_sizes, self.max_pixels)
        )

    @property
    def teachers(self) -> dict[str, Any] | None:
        """What the manifests beside the shards say; None where there are none, as with DataCompDR."""
        return teachers_of(find_shards(self.shards)) if self.shards else None

    def _open_shards(self) -> tuple[Shards, BesideShards | None]:
        shards = Shards(find_shards(self.shards), self.cache)
        if self.images is None:
            return shards, None
        return shards, BesideShards(self.images, shards, self.cache, IMAGE_SUFFIXES)
