"""Datamodule of pairs to reinforce: their augmentations and their shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from torch.utils.data import DataLoader

from ...common.errors import UserError
from ...common.parts import parse_part
from ...common.ranges import COUNT, NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE
from ..base.contract import EmbedsAugmentations, asked_of
from ..base.decode import MAX_PIXELS
from ..base.faults import BadSample
from ..base.loaders import BatchLoader, PredictionLoader
from ..base.sampled import SampledDataModule
from ..base.sampling import generator
from ..base.stages import Split
from ..reading.cache import index_cache
from ..reading.layout import probed_rows
from ..reading.open import Opening, PairSources
from ..reading.resolve import Sources, by_split
from ..reading.shards import Shards
from ..reading.table import PairTable
from ..transforms.replay import OPERATIONS, AugmentationDraw
from .reinforcement_rows import (
    NetworkInputs,
    ReinforcementCollate,
    ReinforcementSet,
    StoredSample,
    View,
    batch_of,
    read_back,
)
from .writer import EmbeddingFormat, ShardFile, Version

_HEADERS = 6 * (512 + 256)
"""Bytes of a sample's six members in addition to their content: for each, a tar header and half a block of padding."""
_AUGMENTATION_BYTES = 60
_TEXT_BYTES = 60


def stored_bytes(augmentations: int, texts: float, width: int, embeddings: EmbeddingFormat) -> float:
    """Return the mean size of a sample in a shard without the file of its image, in bytes.

    Args:
        augmentations: number of augmentations of an image.
        texts: number of captions of an image, real and synthetic.
        width: sum of the embedding dimensions of all teachers.
        embeddings: form of the embeddings.
    """
    vectors = (augmentations + texts) * width * (4 if embeddings == "npz" else 2)
    return vectors + augmentations * _AUGMENTATION_BYTES + texts * _TEXT_BYTES + _HEADERS


class ReinforcementDataModule(SampledDataModule):
    """Image-caption pairs that teachers embed once, into shards in the layout of DataCompDR.

    The datamodule is for `predict` only. A shard holds `shard_size` rows of the data in their order, without unusable
    rows. Existing shards are skipped, so that running the command again continues a killed run; each process takes
    every n-th of the remaining shards. Commands that start apart, such as the tasks of an array, take a `part` each.
    The augmentations of a row are a function of (seed, row, index of the augmentation), for any number of processes,
    workers and rows in a batch.

    The module defines the inputs of its teachers and its captioner (`EmbedsAugmentations`). Batches are those of
    `ReinforcementCollate`.

    Args:
        pairs: images with captions; see `ImageTextDataModule` for the forms. The first caption of a row is used;
            the number of rows with several captions is logged.
        folder: folder of the shards and of `manifest.json`.
        synthetic_column: column of synthetic captions (a text or a list of texts), for a module without a captioner.
        image_root: folder that relative image paths start from.
        image_column: column of the images.
        caption_column: column of the captions.
        augmentations: number of augmentations of each image (DataCompDR-12M: 30, -1B: 10; with 5 the accuracy is almost
            the same, according to the paper).
        crop_scale: smallest and largest share of the image's area in a crop (released data: torchvision's default).
        crop_ratio: smallest and largest aspect ratio of a crop.
        num_ops: number of operations of RandAugment after the crop (released data).
        magnitude: level of these operations, at most 30 (released data).
        operations: operations to draw from (released data: the 14 of RandAugment).
        image_size: side of the image that translations are relative to, pixels (released data).
        version: version of the layout; 2 stores the embeddings of synthetic captions in a separate array.
        embeddings: "npz" stores float32, "pth.gz" bfloat16 (DataCompDR-12M-bf16).
        shard_size: rows per shard; a killed process repeats at most this number of rows (DataCompDR-12M: 12,500).
        part: `i/n` for the shards of part i, from 0, of n; by default all.
        batch_size: pairs per batch.
        max_pixels: images with more pixels are refused before they are decoded.
        cache_dir: folder for the memory-mapped copies of the `datasets` library.
    """

    asks: ClassVar[tuple[type, ...]] = (EmbedsAugmentations,)
    decided_arguments: ClassVar[tuple[str, ...]] = ("eval_batch_size", "persistent_workers")

    def __init__(
        self,
        pairs: Sources = None,
        folder: str = "runs/reinforced",
        synthetic_column: str | None = None,
        image_root: str | None = None,
        image_column: str = "image",
        caption_column: str = "caption",
        augmentations: Annotated[int, COUNT] = 30,
        crop_scale: Annotated[tuple[float, float], POSITIVE_SHARE] = (0.08, 1.0),
        crop_ratio: Annotated[tuple[float, float], POSITIVE] = (3 / 4, 4 / 3),
        num_ops: Annotated[int, NOT_NEGATIVE] = 2,
        magnitude: Annotated[int, NOT_NEGATIVE] = 9,
        operations: list[str] = list(OPERATIONS),  # noqa: B006  (jsonargparse shows it as the default)
        image_size: Annotated[int, COUNT] = 224,
        version: Version = 1,
        embeddings: EmbeddingFormat = "npz",
        shard_size: Annotated[int, COUNT] = 1000,
        part: str | None = None,
        batch_size: int = 16,
        max_pixels: Annotated[int, COUNT] = MAX_PIXELS,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=None, persistent_workers=False, **options)
        self.folder = Path(folder).expanduser()
        self.draw = AugmentationDraw(image_size, crop_scale, crop_ratio, num_ops, magnitude, operations=operations)
        self.image_size = image_size
        self.augmentations = augmentations
        self.version: Version = version
        self.embeddings: EmbeddingFormat = embeddings
        self.shard_size = shard_size
        self.part = parse_part(part, "data.part")
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

    def prepare_data(self) -> None:
        """Convert the files once per node."""
        for sources in (self.pairs, *self.synthetic):
            sources.open("train")

    def setup(self, stage: str | None = None) -> None:
        """Open the pairs, and find the missing shards.

        Raises:
            UserError: If the stage is not `predict`, or the pairs cannot be used.
        """
        if stage not in (None, "predict"):
            raise UserError(f"Expected the command 'predict', got {stage!r}: run `vlightning predict`.")
        super().setup(stage)
        finished = {number for number in range(self.shards) if self.shard_path(number).is_file()}
        # Rank 0 decides which shards are missing: ranks that look later could find more shards, and assign others.
        self._finished = self.trainer.strategy.broadcast(finished) if self.trainer is not None else finished

    def open_split(self, split: Split) -> PairTable | None:
        """Open and check the pairs."""
        if split != "predict":
            return None
        opened = [sources.rows("train", False, 0) for sources in (self.pairs, *self.synthetic)]
        tables = [table for table in opened if isinstance(table, PairTable)]
        if not tables:
            raise UserError("Expected images with captions, got no source: set data.pairs.")
        self._synthetic_rows = tables[1] if self.synthetic else None
        return tables[0]

    def predict_dataloader(self) -> BatchLoader:
        """Return the rows of the missing shards; no batch has rows of two shards."""
        replicas, rank = self.replicas()
        batches = [
            list(rows[start : start + self.batch_size])
            for rows in (self.shard_rows(number) for number in self._missing[rank::replicas])
            for start in range(0, len(rows), self.batch_size)
        ]

        def make(batch_sampler: Any) -> DataLoader[Any]:
            rows = self._opened("predict")
            dataset = ReinforcementSet(
                rows, self._synthetic_rows, self._network_inputs(), self.draw, self.augmentations, self.run_seed
            )
            return self.torch_loader(dataset, ReinforcementCollate(), batch_sampler=batch_sampler)

        # One empty batch if there are no rows, since Lightning skips the hooks after the last batch without batches.
        return self.registered(PredictionLoader(batches or [[]], make, self.account("predict"), skip_empty=False))

    # What the writer asks for

    @property
    def shards(self) -> int:
        """Number of all shards."""
        return -(-len(self._opened("predict")) // self.shard_size)

    @property
    def missing_rows(self) -> int:
        """Number of rows of the missing shards of this part, in all processes."""
        return sum(len(self.shard_rows(number)) for number in self._missing)

    @property
    def _missing(self) -> list[int]:
        """The shards of this part that did not exist when the run began."""
        return [number for number in self.part.of(range(self.shards)) if number not in self._finished]

    @property
    def has_synthetic(self) -> bool:
        """Whether the data has synthetic captions."""
        return bool(self.synthetic)

    def shard_rows(self, number: int) -> range:
        """Return the rows of a shard."""
        start = number * self.shard_size
        return range(start, min(start + self.shard_size, len(self._opened("predict"))))

    def shard_path(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.folder / f"{number:08d}.tar"

    def open_shard(self, number: int) -> ShardFile:
        """Return the writer of a shard; add records by `add(record.key, record.members(version, embeddings))`."""
        return ShardFile(self.shard_path(number))

    def bytes_per_sample(self, width: int, captions: int | None) -> float:
        """Return the mean size of a sample in a shard, estimated from some of the pairs.

        Args:
            width: sum of the embedding dimensions of all teachers.
            captions: number of synthetic captions of an image; None for the captions in the data.
        """
        rows = self._opened("predict")
        sizes = [0]
        texts = []
        for row in probed_rows(len(rows)):
            try:
                sizes.append(len(rows.encoded(row)))
            except BadSample:
                continue
            made = len(self._synthetic_rows.captions(row)) if self._synthetic_rows is not None else captions
            texts.append(1 + (made or 0))
        usable = max(len(texts), 1)
        beside = stored_bytes(self.augmentations, sum(texts) / usable, width, self.embeddings)
        return sum(sizes) / usable + beside

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the shards, as plain data for the manifest."""
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

    def reread(self, count: int) -> Iterator[tuple[dict[str, Any], StoredSample]]:
        """Yield random samples of the finished shards, each as a batch of the loader and with its stored embeddings.

        Args:
            count: largest number of samples.

        Raises:
            UserError: If a sample cannot be read.
        """
        paths = (self.shard_path(number) for number in range(self.shards))
        try:
            shards = Shards([os.path.abspath(path) for path in paths if path.is_file()], self.cache)
        except UserError as error:
            remedy = "or remove the shard and run the command again."
            raise UserError(f"{str(error).rstrip('.')}, {remedy}") from None
        chosen = generator(self.run_seed, len(shards)).permutation(len(shards))[:count]
        inputs = self._network_inputs()
        for sample in sorted(chosen.tolist()):
            try:
                stored = read_back(shards, sample, inputs)
            except (BadSample, UserError, ValueError, LookupError, TypeError) as error:
                raise UserError(
                    f"Expected a readable sample, got {shards.name(sample)} ({error}): remove the shard and run the "
                    "command again."
                ) from None
            yield batch_of([stored.prepared], []), stored

    def _network_inputs(self) -> NetworkInputs:
        module = asked_of(self.trainer, EmbedsAugmentations)  # type: ignore[type-abstract]
        views = (None if module is None else module.views) or [(self.image_size, "bicubic")]
        return NetworkInputs([View(*view) for view in views], None if module is None else module.caption_transform)
