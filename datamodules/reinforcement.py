"""The datamodule over pairs that are to be reinforced: which of them, in which shards, with which augmentations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from .core.base import ImageDataModule, Split
from .core.decode import MAX_PIXELS, BadSample
from .core.loaders import BatchLoader, PredictionLoader
from .core.sampling import generator
from .image_text import PairSources, Sources, by_split
from .sources.open import Opening
from .sources.reinforced_writer import EmbeddingFormat, ShardFile, Version
from .sources.reinforcement_rows import (
    Looks,
    ReinforcementCollate,
    ReinforcementSet,
    View,
    Written,
    batch_of,
    read_back,
)
from .sources.table import PROBED_ROWS, PairTable
from .sources.tar import Shards, index_cache
from .transforms.clip import CLIPEvalTransform
from .transforms.replay import OPERATIONS, AugmentationDraw

_HEADERS = 6 * (512 + 256)
"""Bytes of a sample's six members beside their content: tar's headers, and half a block of padding each."""
_AUGMENTATION_BYTES, _TEXT_BYTES = 60, 60


class ReinforcementDataModule(ImageDataModule):
    """Pairs that teachers are to embed, once, into shards in the layout of DataCompDR.

    For `predict` only. A shard holds `shard_size` rows of the data in their order, less those that cannot be used.
    Shards that are in the folder already are left out, so a run that was killed goes on where it stopped; each process
    takes every n-th of the rest. The augmentations of a row are a function of (seed, row, number of the augmentation),
    whatever the number of processes, workers or rows in a batch.

    Teachers see each augmentation in their own size, which the module tells: `views`, a list of (size, interpolation),
    and `whole`, what makes the captioner's input of an image. Batches are those of :class:`ReinforcementCollate`.

    Args:
        pairs: images with captions; see :class:`ImageTextDataModule` for the forms. Of a row with several captions
            the first is taken, and the number of such rows is logged.
        folder: where the shards go, and `manifest.json`.
        synthetic_column: column of synthetic captions (a text or a list of texts), for a module without a captioner.
        image_root: folder that relative image paths start from.
        image_column: column of the images.
        caption_column: column of the captions.
        augmentations: number of augmentations of each image (DataCompDR-12M: 30, -1B: 10; 5 reach almost the same,
            paper).
        crop_scale: smallest and largest share of the image's area in a crop (released data: torchvision's default).
        crop_ratio: smallest and largest aspect ratio of a crop.
        num_ops: number of operations of RandAugment after the crop (released data).
        magnitude: level of these operations, out of 30 (released data).
        operations: the pool of operations (released data: RandAugment's 14).
        image_size: side that shifts are measured on, pixels (released data).
        version: version of the layout; 2 keeps the embeddings of synthetic captions in an array of their own.
        embeddings: "npz" stores float32, "pth.gz" bfloat16 (DataCompDR-12M-bf16).
        shard_size: rows of a shard, which is what a kill can cost each process (DataCompDR-12M: 12,500).
        batch_size: pairs that the teachers see at a time.
        num_workers: loader processes per process, which decode and augment.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of the augmentations and of the captioner's draws; by default Lightning's global seed, or 0 without
            one.
        max_bad_share: largest share of unusable pairs, of those read so far, with which a run goes on.
        max_pixels: images with more are refused before they are decoded.
        cache_dir: where the ``datasets`` library keeps its memory-mapped copies.
    """

    def __init__(
        self,
        pairs: Sources = None,
        folder: str = "runs/reinforced",
        synthetic_column: str | None = None,
        image_root: str | None = None,
        image_column: str = "image",
        caption_column: str = "caption",
        augmentations: int = 30,
        crop_scale: tuple[float, float] = (0.08, 1.0),
        crop_ratio: tuple[float, float] = (3 / 4, 4 / 3),
        num_ops: int = 2,
        magnitude: int = 9,
        operations: list[str] = list(OPERATIONS),  # noqa: B006  (jsonargparse shows it as the default)
        image_size: int = 224,
        version: Version = 1,
        embeddings: EmbeddingFormat = "npz",
        shard_size: int = 1000,
        batch_size: int = 16,
        num_workers: int = 2,
        pin_memory: bool | None = None,
        seed: int | None = None,
        max_bad_share: float = 0.05,
        max_pixels: int = MAX_PIXELS,
        cache_dir: str | None = None,
    ) -> None:
        unused = CLIPEvalTransform(image_size)
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=None,
            num_workers=num_workers,
            persistent_workers=False,
            pin_memory=pin_memory,
            seed=seed,
            train_transform=unused,
            eval_transform=unused,
            max_bad_share=max_bad_share,
        )
        for name, value in (("augmentations", augmentations), ("shard_size", shard_size)):
            if value < 1:
                raise ValueError(f"found {name}={value}, expected at least 1: raise it")
        self.folder = Path(folder).expanduser()
        self.draw = AugmentationDraw(image_size, crop_scale, crop_ratio, num_ops, magnitude, operations=operations)
        self.image_size = image_size
        self.augmentations = augmentations
        self.version: Version = version
        self.embeddings: EmbeddingFormat = embeddings
        self.shard_size = shard_size
        self.cache = index_cache(cache_dir)
        columns = [caption_column] if synthetic_column is None else [caption_column, synthetic_column]
        # Synthetic captions are the captions of the same rows, read from another column.
        self.pairs, *self.synthetic = (
            PairSources(
                by_split(pairs, None, None, None),
                Opening(image_root, image_column, column, None, cache_dir),
                max_pixels,
            )
            for column in columns
        )
        self._synthetic_rows: PairTable | None = None
        self._finished: set[int] = set()
        self._record_hyperparameters()

    def prepare_data(self) -> None:
        """Convert the files once per node."""
        for sources in (self.pairs, *self.synthetic):
            sources.open("train")

    def setup(self, stage: str | None = None) -> None:
        """Open the pairs, and find out which shards are missing."""
        if stage not in (None, "predict"):
            raise ValueError(f"found the command {stage!r}, expected 'predict': this data is read to be reinforced")
        super().setup(stage)
        found = {number for number in range(self.shards) if self.shard_path(number).is_file()}
        # What the first process sees, or a shard that is finished meanwhile would shift the others' shares.
        self._finished = self.trainer.strategy.broadcast(found) if self.trainer is not None else found

    def open_split(self, split: Split) -> PairTable | None:
        """The pairs, checked."""
        if split != "predict":
            return None
        opened = [sources.rows("train", False, 0) for sources in (self.pairs, *self.synthetic)]
        tables = [table for table in opened if isinstance(table, PairTable)]
        if not tables:
            raise ValueError("found no source in data.pairs, expected images with captions: name some")
        self._synthetic_rows = tables[1] if self.synthetic else None
        return tables[0]

    def predict_dataloader(self) -> BatchLoader:
        """The rows of the missing shards; no batch has rows of two."""
        replicas, rank = self.replicas()
        missing = [number for number in range(self.shards) if number not in self._finished]
        batches = [
            list(rows[start : start + self.batch_size])
            for rows in (self.shard_rows(number) for number in missing[rank::replicas])
            for start in range(0, len(rows), self.batch_size)
        ]

        def make(batch_sampler: Any) -> DataLoader[Any]:
            rows = self._opened("predict")
            draws = (self.draw, self.augmentations, self.run_seed)
            dataset = ReinforcementSet(rows, self._synthetic_rows, self._looks(), *draws)
            return self._inner(dataset, ReinforcementCollate(), batch_sampler=batch_sampler)

        # Without any rows there is one batch of none: Lightning would skip what follows the last batch too.
        return self._remember(PredictionLoader(batches or [[]], make, self.account("predict"), skip_empty=False))

    # What the writer asks for

    @property
    def shards(self) -> int:
        """Number of shards in all."""
        return -(-len(self._opened("predict")) // self.shard_size)

    @property
    def missing_rows(self) -> int:
        """Rows of the shards that are still to be written, over all processes."""
        return sum(len(self.shard_rows(number)) for number in range(self.shards) if number not in self._finished)

    @property
    def has_synthetic(self) -> bool:
        """Whether the data brings synthetic captions."""
        return bool(self.synthetic)

    def shard_rows(self, number: int) -> range:
        """The rows of a shard."""
        start = number * self.shard_size
        return range(start, min(start + self.shard_size, len(self._opened("predict"))))

    def shard_path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{number:08d}.tar"

    def open_shard(self, number: int) -> ShardFile:
        """Start a shard; records go into it as ``add(record.key, record.members(version, embeddings))``."""
        return ShardFile(self.shard_path(number))

    def bytes_per_sample(self, width: int, captions: int | None) -> float:
        """Size of a sample in its shard, from some of the pairs.

        Args:
            width: of all teachers' embeddings together.
            captions: synthetic ones of an image; None counts those that the data brings.
        """
        rows, sizes, texts = self._opened("predict"), [0], []
        for row in np.unique(np.linspace(0, len(rows) - 1, PROBED_ROWS).astype(int)).tolist():
            try:
                sizes.append(len(rows.encoded(row)))
            except BadSample:
                continue
            made = len(self._synthetic_rows.captions(row)) if self._synthetic_rows is not None else captions
            texts.append(1 + (made or 0))
        usable = max(len(texts), 1)
        vectors = self.augmentations + sum(texts) / usable
        plain = self.augmentations * _AUGMENTATION_BYTES + sum(texts) / usable * _TEXT_BYTES
        return sum(sizes) / usable + vectors * width * (4 if self.embeddings == "npz" else 2) + plain + _HEADERS

    def settings(self) -> dict[str, Any]:
        """What decides the content of the shards, plain data for the manifest."""
        draw = self.draw
        operations = [OPERATIONS[number] for number in draw.operations]
        return {
            "data": {
                "pairs": [layout.origin for layout in self._opened("predict").layouts],
                "rows": len(self._opened("predict")),
                "caption_column": self.hparams["caption_column"],
                "synthetic_column": self.hparams["synthetic_column"],
                "shard_size": self.shard_size,
            },
            "augmentation": {
                "per_image": self.augmentations,
                "seed": self.run_seed,
                "crop_scale": list(draw.crop.scale),
                "crop_ratio": list(draw.crop.ratio),
                "num_ops": draw.num_ops,
                "operations": {name: draw.magnitudes[OPERATIONS.index(name)] for name in operations},
                "image_size": self.image_size,
            },
            "storage": {"version": self.version, "embeddings": self.embeddings},
        }

    def reread(self, count: int) -> Iterator[tuple[dict[str, Any], Written]]:
        """Random samples of the finished shards, each as a batch that the loader could have given, and as it stands.

        Args:
            count: how many, all where there are fewer.

        Raises:
            RuntimeError: one of them cannot be read.
        """
        paths = (self.shard_path(number) for number in range(self.shards))
        try:
            shards = Shards([os.path.abspath(path) for path in paths if path.is_file()], self.cache)
        except ValueError as error:
            raise RuntimeError(f"{error}, or remove the shard and run the command again") from None
        chosen = generator(self.run_seed, len(shards)).permutation(len(shards))[:count]
        looks = self._looks()
        for sample in sorted(chosen.tolist()):
            try:
                written = read_back(shards, sample, looks)
            except (BadSample, ValueError, LookupError, TypeError) as error:
                raise RuntimeError(
                    f"found an unreadable sample, {shards.name(sample)} ({error}), expected what was written there: "
                    "remove the shard and run the command again"
                ) from None
            yield batch_of([written.looked], []), written

    def _looks(self) -> Looks:
        module = self.trainer.lightning_module if self.trainer is not None else None
        views = getattr(module, "views", None) or [(self.image_size, "bicubic")]
        return Looks([View(*view) for view in views], getattr(module, "whole", None))
