"""The datamodule over images and captions on disk or on the hub."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from .core.base import Split, splits_of
from .core.decode import MAX_PIXELS
from .pairs import PairDataModule
from .sources.open import Opening, Source, as_source
from .sources.stream import Stream
from .sources.table import Layout, PairTable
from .transforms.clip import pair_eval_transform, pair_train_transform

Sources = str | Source | list[str | Source] | None


class ImageTextDataModule(PairDataModule):
    """Images with captions from Parquet, JSON, image folders, WebDataset shards or the hub.

    Args:
        train: training rows: a file, glob pattern, folder or hub name, a :class:`Source`, or a list of these, read one
            after another. Files: ``.parquet``; ``.json`` in ALBEF's form (a list of objects), ``.jsonl``, ``.csv``;
            ``.tar`` in WebDataset's form; ``dataset_coco.json`` and ``dataset_flickr30k.json`` with Karpathy's splits,
            of which each argument takes its own. Folders: of such files, of images with a ``metadata.jsonl`` (key
            ``file_name``), or saved by ``datasets``.
        validation: rows for validation, in the same forms.
        test: rows for testing, in the same forms.
        predict: rows for prediction; captions may be missing, and images themselves be named.
        predict_texts: texts for prediction, beside images or alone: a text file with one a line, or a list of texts.
        image_root: folder that relative image paths start from; by default that of the file which names them.
        image_column: column of the images (encoded, or paths).
        caption_column: column of the captions, each a string or a list of strings. Training draws one of them,
            evaluation uses all.
        image_id_column: column whose equal values mean the same image; by default ``image_id`` where there is one,
            else the image's path.
        batch_size: training rows per process and batch (ALBEF: 64).
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process (ALBEF: 4).
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order, augmentation and caption choice; by default Lightning's global seed, or 0 without
            one. The value in a checkpoint wins when a run is resumed.
        image_size: side of the square images, pixels; by default the module's, or 256 (ALBEF).
        horizontal_flip: mirror half of the training images, as ALBEF does; switch it off where captions tell left
            from right. Has no effect beside a ``train_transform``.
        train_transform: RGB image to float [3, H, W]; by default ALBEF's training transform, interpolated and
            normalised as the module's weights expect it, where they were trained before.
        eval_transform: RGB image to float [3, H, W], for evaluation and prediction; by default what the module's
            weights expect, else ALBEF's test transform.
        tokenizer: hub name, local folder, BERT ``vocab.txt`` or ``tokenizer.json``, or "clip" for CLIP's own; by
            default a WordPiece tokenizer is trained on the training captions, and travels in the checkpoint.
        vocab_size: largest number of entries a tokenizer may have (BERT: 30,522); a trained one gets at most as many.
        max_tokens: longest token sequence, special tokens included (ALBEF: 25).
        append_sep: end sequences with [SEP], as BERT does; the ALBEF authors do not.
        clean_captions: apply ALBEF's caption cleaning.
        max_words: words kept by the cleaning (ALBEF: 30).
        max_bad_share: largest share of unusable samples, of those read so far, with which a run goes on.
        max_pixels: images with more are refused before they are decoded.
        streaming: read all splits on the fly, without a memory-mapped copy.
        samples_per_epoch: training rows in an epoch, over all processes; needed for streaming, where nobody has counted
            them.
        shuffle_block: rows that are shuffled together in streaming, and held in memory (encoded) by each loader worker.
        cache_dir: where the ``datasets`` library keeps its memory-mapped copies.
    """

    def __init__(
        self,
        train: Sources = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        predict_texts: str | list[str] | None = None,
        image_root: str | None = None,
        image_column: str = "image",
        caption_column: str = "caption",
        image_id_column: str | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: int | None = None,
        image_size: int | None = None,
        horizontal_flip: bool = True,
        train_transform: nn.Module | None = None,
        eval_transform: nn.Module | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 30522,
        max_tokens: int = 25,
        append_sep: bool = True,
        clean_captions: bool = False,
        max_words: int = 30,
        max_bad_share: float = 0.05,
        max_pixels: int = MAX_PIXELS,
        streaming: bool = False,
        samples_per_epoch: int | None = None,
        shuffle_block: int = 1024,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            train_transform=train_transform,
            eval_transform=eval_transform,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            append_sep=append_sep,
            clean_captions=clean_captions,
            max_words=max_words,
            max_bad_share=max_bad_share,
            predict_texts=predict_texts,
        )
        if streaming and train is not None and samples_per_epoch is None:
            raise ValueError(
                "found streaming=true without samples_per_epoch, expected the number of training rows that make an "
                "epoch: set data.samples_per_epoch"
            )
        if shuffle_block < 1:
            raise ValueError(f"found shuffle_block={shuffle_block}, expected at least 1: raise it")
        self.streaming = streaming
        self.samples_per_epoch = samples_per_epoch
        self.shuffle_block = shuffle_block
        self.horizontal_flip = horizontal_flip
        self._image_size = image_size
        self.max_pixels = max_pixels
        self.pairs = PairSources(
            by_split(train, validation, test, predict),
            Opening(image_root, image_column, caption_column, image_id_column, cache_dir),
            max_pixels,
            streaming,
        )
        self._record_hyperparameters()

    @property
    def image_size(self) -> int:
        """Side of the square images, pixels."""
        return self._image_size or self.expected_preprocessing().get("image_size") or 256

    def default_train_transform(self) -> nn.Module:
        """ALBEF's, normalised as trained weights expect it."""
        flip = 0.5 if self.horizontal_flip else 0.0
        return pair_train_transform(self.image_size, self.expected_preprocessing(), horizontal_flip=flip)

    def default_eval_transform(self) -> nn.Module:
        """What trained weights expect, else ALBEF's."""
        return pair_eval_transform(self.image_size, self.expected_preprocessing())

    def prepare_data(self) -> None:
        """Convert the files once per node, so that the other processes find the memory-mapped copies.

        Under a trainer only those of the splits that it is going to read: a checkpoint's data settings name training
        files that may not be where a prediction runs.
        """
        if not self.streaming:
            for split in splits_of(self.trainer.state.fn if self.trainer is not None else None):
                self.pairs.open(split)

    def open_split(self, split: Split) -> PairTable | Stream | None:
        """The rows of a split, checked."""
        return self.pairs.rows(split, self.clean_captions, self.max_words)


@dataclass
class PairSources:
    """Where the images with captions of each split come from, and how they are opened.

    Args:
        sources: by split.
        opening: settings that all sources share.
        max_pixels: larger images are refused.
        streaming: read on the fly, without a memory-mapped copy.
    """

    sources: dict[Split, list[str | Source]]
    opening: Opening
    max_pixels: int
    streaming: bool = False

    def open(self, split: Split) -> list[tuple[Any, Layout]]:
        """The sources of a split, opened."""
        opening = dataclasses.replace(self.opening, need_captions=split != "predict")
        return [opening.open(source, split, self.streaming) for source in self.sources[split]]

    def rows(self, split: Split, clean: bool, max_words: int) -> PairTable | Stream | None:
        """The rows of a split, checked; None where it has no source.

        Raises:
            ValueError: none of them can be used.
        """
        parts = self.open(split)
        if not parts:
            return None
        rows = Stream(parts, self.max_pixels) if self.streaming else PairTable(parts, self.max_pixels)
        rows.check(split, split != "predict", clean, max_words)
        return rows


def by_split(train: Sources, validation: Sources, test: Sources, predict: Sources) -> dict[Split, list[str | Source]]:
    """A datamodule's arguments as lists of sources."""
    return {
        "train": listed(train),
        "validation": listed(validation),
        "test": listed(test),
        "predict": listed(predict),
    }


def listed(sources: Sources) -> list[str | Source]:
    """Sources as a list, in whichever form they were given."""
    several = sources if isinstance(sources, (list, tuple)) else [] if sources is None else [sources]
    return [source if isinstance(source, str) else as_source(source) for source in several]
