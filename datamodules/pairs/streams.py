"""Samples and loaders of streamed pairs; `streams` reads their rows in an order that is a function of counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

from ...common.errors import UserError
from ..base.decode import Decoder, decoding_by
from ..base.faults import BadSample, Outcome
from ..base.loaders import BatchLoader
from ..base.sampled import RowLoaders
from ..base.samples import Transform
from ..base.sampling import TrainingPosition
from ..base.stages import Split
from ..reading.stream import Stream, StreamedRow
from ..streams.order import ORDER
from ..streams.reader import StreamBatchSampler, StreamedSet
from ..text.tokenizers import Encoder
from .samples import EvaluationReader, PairReader, Sample, ShortTexts


@dataclass(eq=False)
class OneRow:
    """A streamed row with the members of `PairRows` that `PairReader` reads.

    Args:
        stream: shards of the split.
        item: the row, with its image still encoded.
    """

    stream: Stream
    item: StreamedRow

    def captions(self, row: int) -> list[str]:
        """Return the raw captions; raises `BadSample`."""
        fault = self.item.row.fault
        if fault is not None:
            raise BadSample(*fault)
        return self.item.row.captions

    def image(self, row: int) -> Image.Image:
        """Return the decoded image (RGB); raises `BadSample`."""
        image: Image.Image = self.stream.decoder(self.item)()
        return image

    def image_id(self, row: int) -> int:
        """Return a number that is equal for rows of the same image."""
        return self.stream.image_id(self.item)

    def name(self, row: int) -> str:
        """Return the name of the row in messages."""
        return self.item.name


@dataclass(eq=False)
class StreamedPairReader:
    """Reader of streamed training samples: an augmented image with one of its captions.

    Args:
        stream: shards of the split.
        transform: image to float [3, H, W].
        encoder: decides which captions are usable.
        short_texts: as in `PairReader`.
    """

    stream: Stream
    transform: Transform
    encoder: Encoder
    short_texts: ShortTexts | None = None

    def __call__(self, item: StreamedRow, numbers: tuple[int, int]) -> Sample:
        """Return the sample of a row with its random numbers; raises `BadSample`."""
        read = PairReader(OneRow(self.stream, item), self.transform, self.encoder, self.short_texts)
        return read(0, numbers)._replace(sample_index=item.sample_index)


@dataclass(eq=False)
class StreamedEvaluationSet(IterableDataset[list[Outcome]]):
    """Dataset of the part of an evaluation split that this process evaluates.

    Over all processes, each image is evaluated exactly once. Each process reads all rows and decodes its own part. All
    processes have the same number of batches. Rows of the same image must be adjacent.

    Args:
        stream: shards of the split.
        read: reader of the images.
        batch_size: images per process and batch.
        replicas: number of processes, and the index of this one.
        decoder: decoder of the images.
    """

    stream: Stream
    read: EvaluationReader
    batch_size: int
    replicas: tuple[int, int]
    decoder: Decoder = "pillow"

    def __iter__(self) -> Iterator[list[Outcome]]:
        count, _ = self.replicas
        global_batch = self.batch_size * count
        waiting: list[list[StreamedRow]] = []
        for image in self._images():
            waiting.append(image)
            # The last batch is held back until one more image per process is there, so that no process lacks an image.
            if len(waiting) == global_batch + count:
                yield self._outcomes(waiting[:global_batch])
                waiting = waiting[global_batch:]
        if len(waiting) < count:
            raise UserError(
                f"Expected at least one image to evaluate for each of {count} processes, got {len(waiting)}: use fewer "
                "devices or a larger split."
            )
        yield self._outcomes(waiting)

    def _images(self) -> Iterator[list[StreamedRow]]:
        group: list[StreamedRow] = []
        finished: set[int] = set()
        current = 0
        for item in self.stream.all_rows():
            if item.row.fault is not None:
                yield [item]  # may be between two rows of one image
                continue
            identity = self.stream.image_id(item)
            if group and identity != current:
                finished.add(current)
                yield group
                group = []
            if identity in finished:
                raise UserError(
                    f"Expected adjacent rows of each image in a streamed split, got the image id {item.row.image_id!r} "
                    f"again in {item.name}: sort the file, or set data.streaming to false."
                )
            current = identity
            group.append(item)
        if group:
            yield group

    def _outcomes(self, images: list[list[StreamedRow]]) -> list[Outcome]:
        count, rank = self.replicas
        positions = np.array_split(np.arange(len(images)), count)[rank].tolist()
        with decoding_by(self.decoder):
            return [self._outcome(images[position]) for position in positions]

    def _outcome(self, rows: list[StreamedRow]) -> Outcome:
        if rows[0].row.fault is not None:  # a row with a fault has no id, so it is a group of its own
            return Outcome(None, 1, [rows[0].row.fault])
        captions = [caption for item in rows for caption in item.row.captions]
        load = self.stream.decoder(rows[0])
        return self.read(load, captions, rows[0].name, self.stream.image_id(rows[0]), rows[0].sample_index)


class StreamLoaders(RowLoaders):
    """Loaders of streamed pairs, in place of those of rows in random access.

    Args:
        data: a `PairDataModule`.
        samples_per_epoch: training rows per epoch, over all processes.
        block: number of rows that are shuffled together.
    """

    data: Any  # a `PairDataModule`

    def __init__(self, data: Any, samples_per_epoch: int, block: int) -> None:
        super().__init__(data)
        self.samples_per_epoch = samples_per_epoch
        self.block = block

    def epoch_rows(self, rows: Stream) -> int:
        """Return the number of training rows in an epoch, over all processes."""
        return self.samples_per_epoch

    def stream_settings(self, rows: Stream) -> dict[str, Any]:
        """Return by name what the order of a stream depends on, which a resumed run must not change."""
        return {
            "order": ORDER,
            "global batch": self.data.batch_size * self.data.replicas()[0],
            "data.samples_per_epoch": self.samples_per_epoch,
            "data.shuffle_block": self.block,
            "data.mixing_temperature": self.data.mixing_temperature,
            "shards": rows.shards_read(),
        }

    def check_random_access(self, split: Split, content: str) -> None:
        """Refuse access by position, which a stream does not have; arguments and errors as in the base."""
        raise UserError(
            f"Expected a {split} split with {content} in random access, got a streamed one: set data.streaming to "
            "false."
        )

    def training_loader(self, rows: Stream, length: int, position: TrainingPosition) -> DataLoader[Any]:
        """Return torch's loader of training batches, whose rows are read ahead; arguments as in the base."""
        data = self.data
        transform = data.worker_transform(training=True)
        read = StreamedPairReader(rows, transform, data.encoder(), data.short_texts)
        dataset = StreamedSet(rows, read, data.run_seed)
        sampler = StreamBatchSampler(
            rows,
            data.run_seed,
            data.batch_size,
            length,
            self.block,
            data.replicas(),
            position,
            data.mixing_temperature,
            lambda: position.frozen_order,
        )
        return data.torch_loader(
            dataset,
            data.training_collate(),
            batch_sampler=sampler,
            persistent_workers=data.persistent_workers and data.num_workers > 0,
        )

    def evaluation_loader(self, rows: Stream, split: Split, limited: bool) -> BatchLoader:
        """Return the loader of an evaluation, of unknown length; arguments as in the base."""
        data = self.data

        def make() -> DataLoader[Any]:
            reader = data.evaluation_reader(split)
            dataset = StreamedEvaluationSet(rows, reader, data.eval_batch_size, data.replicas())
            # At most one worker, since each worker would read all rows.
            return data.torch_loader(dataset, data.evaluation_collate(split), min(data.num_workers, 1), batch_size=None)

        return BatchLoader(make, None, data.account(split), keep=False, skip_empty=data.replicas()[0] == 1)
