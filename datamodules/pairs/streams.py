"""Datasets of streamed splits; order and position are functions of counters, without the state of a shuffle buffer.

A *stream* is the sequence of rows that one loader worker of one process reads: with `W` workers in each of `N`
processes there are `N*W` streams. In each pass over the data the shards are assigned to the streams in an order that
is drawn from (seed, epoch, pass); if there are fewer shards than streams, each stream reads all shards and keeps every
`N*W`-th row. A stream is divided into blocks, and each block is shuffled by (seed, epoch, stream, block). A run
resumes exactly, and is refused with another number of workers or processes (`StreamLoaders.stream_settings`).

If rows can be counted without reading them (tar and Parquet files on disk), reading starts at the block of the current
position. Otherwise (JSON, the hub, compressed tar files) the earlier rows are read as well, but not decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...common.errors import UserError
from ..base.decode import Decoder, decoding_by
from ..base.faults import BadSample, Fault, Outcome
from ..base.loaders import BatchLoader
from ..base.sampled import RowLoaders
from ..base.samples import ATTEMPTS, Transform
from ..base.sampling import TrainingPosition, block_order, sample_numbers, shard_order, substitute
from ..base.stages import Split
from ..reading.stream import Stream, StreamedRow
from ..text.tokenizers import Encoder
from .samples import EvaluationReader, PairReader, ShortTexts


class Share(NamedTuple):
    """Rows that a stream reads in one pass: every `step`-th row of some shards, starting at row `start`."""

    shards: list[int]
    start: int
    step: int


@dataclass(eq=False)
class StreamedBlock:
    """Rows of a stream that are shuffled together, with the members of `PairRows` that `PairReader` reads.

    Args:
        stream: shards of the split.
        rows: the rows, with their images still encoded.
    """

    stream: Stream
    rows: list[StreamedRow]

    def captions(self, row: int) -> list[str]:
        """Return the raw captions; raises `BadSample`."""
        fault = self.rows[row].row.fault
        if fault is not None:
            raise BadSample(*fault)
        return self.rows[row].row.captions

    def image(self, row: int) -> Image.Image:
        """Return the decoded image (RGB); raises `BadSample`."""
        image: Image.Image = self.stream.decoder(self.rows[row])()
        return image

    def image_id(self, row: int) -> int:
        """Return a number that is equal for rows of the same image."""
        return self.stream.image_id(self.rows[row])

    def name(self, row: int) -> str:
        """Return the name of a row in messages."""
        return self.rows[row].name


@dataclass(eq=False)
class StreamedTrainingSet(IterableDataset[list[Outcome]]):
    """Dataset of the training batches of this process, starting at a position.

    Args:
        stream: shards of the split.
        transform: image to float [3, H, W].
        encoder: decides which captions are usable.
        seed: the run's seed.
        batch_size: rows per process and batch.
        batches: number of batches in a full epoch.
        block: number of rows that are shuffled together.
        replicas: number of processes, and the index of this one.
        position: epoch, and number of batches that were already done in it.
        decoder: decoder of the images.
        short_texts: as in `PairReader`.
    """

    stream: Stream
    transform: Transform
    encoder: Encoder
    seed: int
    batch_size: int
    batches: int
    block: int
    replicas: tuple[int, int]
    position: tuple[int, int]
    decoder: Decoder = "pillow"
    short_texts: ShortTexts | None = None

    def __post_init__(self) -> None:
        self.epoch, self.done = self.position

    def __iter__(self) -> Iterator[list[Outcome]]:
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        worker = 0 if info is None else info.id
        # The loader takes batches from the workers in turn and starts with worker 0, so that worker 0 continues the
        # stream that comes next at this position.
        stream = (worker + self.done) % workers
        count, rank = self.replicas
        batches = range(stream, self.batches, workers)
        done = len(range(stream, min(self.done, self.batches), workers))
        items = self._shuffled(rank * workers + stream, count * workers, done * self.batch_size)
        for _ in batches[done:]:
            with decoding_by(self.decoder):
                batch = [self._outcome(*next(items)) for _ in range(self.batch_size)]
            yield batch

    def _shuffled(self, number: int, streams: int, skipped: int) -> Iterator[tuple[int, StreamedBlock]]:
        """Yield pairs of a position in a block and the block, without end, and without the first `skipped` pairs.

        The stream is number `number` of the `streams` of all processes.
        """
        block = 0
        remaining = skipped
        for pass_number in itertools.count():
            share = self._share(pass_number, number, streams)
            count = self._count(share, remaining) if remaining else None
            if count and count <= remaining:
                remaining -= count
                block += -(-count // self.block)
                continue
            jumped = remaining // self.block if count else 0
            remaining -= jumped * self.block
            start = block
            block += jumped
            for rows in self._blocks(share, jumped * self.block):
                if remaining < len(rows):
                    order = block_order(self.seed, self.epoch, number, block, len(rows)).tolist()
                    shuffled = StreamedBlock(self.stream, rows)
                    for position in order[remaining:]:
                        yield position, shuffled
                remaining = max(remaining - len(rows), 0)
                block += 1
            if block == start:
                raise UserError(
                    f"Expected at least one row for each of {streams} loader workers of all processes, got none for "
                    f"worker {number}: decrease data.num_workers."
                )

    def _share(self, pass_number: int, number: int, streams: int) -> Share:
        """Return the rows that a stream reads in a pass."""
        order = shard_order(self.seed, self.epoch, pass_number, self.stream.mix).tolist()
        return Share(order[number::streams], 0, 1) if len(order) >= streams else Share(order, number, streams)

    def _count(self, share: Share, enough: int) -> int | None:
        """Return the number of rows of a share; None if it is unknown. Counting stops above `enough`."""
        rows = 0
        rows_of_shards = 0
        for shard in share.shards:
            count = self.stream.count(shard)
            if count is None:
                return None
            rows_of_shards += count
            rows = max(0, -((share.start - rows_of_shards) // share.step))
            if rows > enough:
                break
        return rows

    def _blocks(self, share: Share, skipped: int) -> Iterator[list[StreamedRow]]:
        """Yield the rows of a share in blocks, without the first `skipped` rows."""
        rows: list[StreamedRow] = []
        for item in self._rows(share, skipped):
            rows.append(item)
            if len(rows) == self.block:
                yield rows
                rows = []
        if rows:
            yield rows

    def _rows(self, share: Share, skipped: int) -> Iterator[StreamedRow]:
        """Yield the rows of a share without the first `skipped` rows, which are not read if they can be counted."""
        wanted = share.start + skipped * share.step  # index in the current shard
        for shard in share.shards:
            jump = wanted >= share.step
            count = self.stream.count(shard) if jump else None
            if count is not None and count <= wanted:
                wanted -= count
                continue
            end = start = wanted if jump else 0
            for end, item in enumerate(self.stream.rows(shard, start), start + 1):
                if end - 1 == wanted:
                    yield item
                    wanted += share.step
            wanted -= end

    def _outcome(self, position: int, block: StreamedBlock) -> Outcome:
        """Read the row at a position in a block, or else a substitute from the same block."""
        read = PairReader(block, self.transform, self.encoder, self.short_texts)
        faults: list[Fault] = []
        planned = block.rows[position].sample_index
        for attempt in range(ATTEMPTS):
            if attempt:
                position = substitute(self.seed, self.epoch, planned, attempt, len(block.rows))
            sample_index = block.rows[position].sample_index
            try:
                sample = read(position, sample_numbers(self.seed, self.epoch, sample_index))
            except BadSample as bad:
                faults.append(bad.fault)
                continue
            return Outcome(sample._replace(sample_index=sample_index), attempt + 1, faults)
        return Outcome(None, ATTEMPTS, faults)


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

    keeps_workers = False  # workers get the position when they start, so each pass starts new workers
    data: Any  # a `PairDataModule`

    def __init__(self, data: Any, samples_per_epoch: int, block: int) -> None:
        super().__init__(data)
        self.samples_per_epoch = samples_per_epoch
        self.block = block

    def epoch_rows(self, rows: Stream) -> int:
        """Return the number of training rows in an epoch, over all processes."""
        return self.samples_per_epoch

    def stream_settings(self, rows: Stream) -> dict[str, Any]:
        """Return by name what divides the rows of a stream, which a resumed run must not change."""
        return {
            "data.num_workers": max(self.data.num_workers, 1),  # with 0 the process itself is the only worker
            "processes": self.data.replicas()[0],
            "data.batch_size": self.data.batch_size,
            "data.samples_per_epoch": self.samples_per_epoch,
            "data.shuffle_block": self.block,
            "shards": rows.shards_read(),
        }

    def check_random_access(self, split: Split, content: str) -> None:
        """Refuse access by position, which a stream does not have; arguments and errors as in the base."""
        raise UserError(
            f"Expected a {split} split with {content} in random access, got a streamed one: set data.streaming to "
            "false."
        )

    def training_loader(self, rows: Stream, length: int, position: TrainingPosition) -> DataLoader[Any]:
        """Return torch's loader of training batches, which the workers build themselves; arguments as in the base."""
        data = self.data
        dataset = StreamedTrainingSet(
            rows,
            data.worker_transform(training=True),
            data.encoder(),
            data.run_seed,
            data.batch_size,
            length,
            self.block,
            data.replicas(),
            position(),
            short_texts=data.short_texts,
        )
        return data.torch_loader(dataset, data.training_collate(), batch_size=None)

    def evaluation_loader(self, rows: Stream, split: Split, limited: bool) -> BatchLoader:
        """Return the loader of an evaluation, of unknown length; arguments as in the base."""
        data = self.data

        def make() -> DataLoader[Any]:
            reader = data.evaluation_reader(split)
            dataset = StreamedEvaluationSet(rows, reader, data.eval_batch_size, data.replicas())
            # At most one worker, since each worker would read all rows.
            return data.torch_loader(dataset, data.evaluation_collate(split), min(data.num_workers, 1), batch_size=None)

        return BatchLoader(make, None, data.account(split), keep=False, skip_empty=data.replicas()[0] == 1)
