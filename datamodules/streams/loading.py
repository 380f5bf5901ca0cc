"""A loader of streamed pairs for LightningModules and datamodules of other projects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from ...common.errors import UserError
from ..base.decode import MAX_PIXELS
from ..base.faults import Account, BadSample, Collated, Outcome
from ..base.loaders import BatchLoader, inner_loader, replicas_of
from ..base.samples import usable_samples
from ..base.sampling import TrainingPosition, batches_per_epoch, compare_order, seeded, share_of_batch
from ..reading.open import Opening
from ..reading.remote import RETRIES
from ..reading.resolve import as_source
from ..reading.stream import Stream, StreamedRow
from .order import ORDER
from .reader import StreamBatchSampler, StreamedSet


@dataclass(frozen=True)
class StreamedPair:
    """A row of a stream, whose image is still encoded.

    Args:
        stream: shards of the stream.
        item: the row.
        seed: 64-bit random number of the row in this epoch, which torch, NumPy and `random` are seeded with.
    """

    stream: Stream
    item: StreamedRow
    seed: int

    @property
    def captions(self) -> list[str]:
        """The texts of the row; raises `BadSample` for a row that cannot be read."""
        if self.item.row.fault is not None:
            raise BadSample(*self.item.row.fault)
        return self.item.row.captions

    @property
    def index(self) -> int:
        """Number of the row: its shard times 2**32 plus its place in the shard."""
        return self.item.sample_index

    @property
    def image_id(self) -> int:
        """A number that is equal for rows of the same image."""
        return self.stream.image_id(self.item)

    def image(self) -> Image.Image:
        """Return the decoded image (RGB); raises `BadSample`."""
        return self.stream.decoder(self.item)()


class StreamLoader(BatchLoader):
    """Loader of a stream; its state in a checkpoint is what the order depends on, since the trainer counts batches."""

    def __init__(self, settings: dict[str, Any], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.settings = settings

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return dict(self.settings)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the order of a checkpoint is this one.

        Raises:
            UserError: If it is another one.
        """
        sizes = {"global_batch_size": 0, "rows": 0, "processes": 0}
        compare_order({"stream": state_dict, **sizes}, {"stream": self.settings, **sizes})


@dataclass
class _Prepared:
    """Reads rows for `StreamedSet`."""

    stream: Stream
    prepare: Callable[[StreamedPair], Any]

    def __call__(self, item: StreamedRow, numbers: tuple[int, int]) -> Any:
        with seeded(numbers[0]):
            return self.prepare(StreamedPair(self.stream, item, numbers[0]))


@dataclass
class _Collate:
    """Collates outcomes, whose counts are kept apart from the batch."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        samples, num_read, faults = usable_samples(outcomes)
        return Collated(self.collate(samples) if len(samples) == len(outcomes) else None, num_read, faults)


def stream_loader(
    sources: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    prepare: Callable[[StreamedPair], Any],
    *,
    global_batch_size: int,
    samples_per_epoch: int,
    trainer: pl.Trainer | None = None,
    seed: int = 0,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
    pin_memory: bool = False,
    shuffle_block: int = 1024,
    mixing_temperature: float = 1.0,
    image_column: str = "image",
    caption_column: str = "caption",
    image_id_column: str | None = None,
    cache_dir: str | None = None,
    read_retries: int = RETRIES,
    max_bad_share: float = 0.05,
) -> StreamLoader:
    """Return a loader of training batches from tar or Parquet files, on disks or by URL, to return to a Trainer.

    Global batch b of an epoch is a function of (seed, epoch, b), whatever the numbers of processes and workers. A
    checkpoint of the Trainer suffices to resume at any step: the position is its count of batches.

    Args:
        sources: files, patterns, folders and URLs, as `train` of `ImageTextDataModule`, also with weights, as in
            `{"path": "s3://bucket/*.tar", "weight": 2}`.
        prepare: returns the sample of a row, in a loader worker; draws from torch, NumPy and `random` are a function of
            (seed, epoch, row). It raises `BadSample(cause, name)` for a row that cannot be used, which is replaced.
        global_batch_size: rows per batch of all processes together.
        samples_per_epoch: rows per epoch, over all processes.
        trainer: the trainer whose position is read: `self.trainer` of a module or datamodule. Without one each pass is
            the next epoch, in one process.
        seed: seed of order and draws.
        num_workers: loader workers per process.
        collate: returns the batch of a list of samples.
        pin_memory: whether to copy batches to page-locked memory.
        shuffle_block: least number of rows that are shuffled together, over all processes.
        mixing_temperature: as of the datamodules.
        image_column: column, or in tar files ignored, of the images.
        caption_column: column, or in tar files the key, of the texts.
        image_id_column: column of the ids of the images; None for "image_id" if it exists.
        cache_dir: folder of the offsets of samples in tar files; None for `$XDG_CACHE_HOME/vlightning`.
        read_retries: number of times that a failed read by URL is tried again.
        max_bad_share: largest share of unusable rows with which the run continues.

    Raises:
        UserError: If a source cannot be opened, or the processes do not divide the global batch.
    """
    named = [sources] if isinstance(sources, str | Mapping) else list(sources)
    opening = Opening(None, image_column, caption_column, image_id_column, cache_dir, retries=read_retries)
    opened = [opening.open(as_source(dict(one) if isinstance(one, Mapping) else one), "train", True) for one in named]
    if not opened:
        raise UserError("Expected at least one source of a stream, got none: name files.")
    stream = Stream(opened, MAX_PIXELS)
    replicas = replicas_of(trainer)
    batch_size = share_of_batch(global_batch_size, replicas[0])
    length = batches_per_epoch(samples_per_epoch, batch_size, replicas[0])
    position = TrainingPosition(trainer, length)
    settings = {
        "order": ORDER,
        "global batch": global_batch_size,
        "samples_per_epoch": samples_per_epoch,
        "shuffle_block": shuffle_block,
        "mixing_temperature": mixing_temperature,
        "seed": seed,
        "shards": stream.shards_read(),
    }

    def make() -> DataLoader[Any]:
        sampler = StreamBatchSampler(
            stream,
            seed,
            batch_size,
            length,
            shuffle_block,
            replicas,
            position,
            mixing_temperature,
            lambda: position.frozen_order,
        )
        dataset = StreamedSet(stream, _Prepared(stream, prepare), seed)
        return inner_loader(dataset, _Collate(collate), num_workers, batch_sampler=sampler, pin_memory=pin_memory)

    account = Account("train", max_bad_share)
    return StreamLoader(settings, make, length, account, keep=False, started=lambda: position.done)
