"""Datasets of streamed splits; order and position are functions of counters, without the state of a shuffle buffer.

A *stream* is the sequence of rows that one loader worker of one process reads: with `W` workers in each of `N`
processes there are `N*W` streams. In each pass over the data the shards are assigned to the streams in an order that
is drawn from (seed, epoch, pass); if there are fewer shards than streams, each stream reads all shards and keeps every
`N*W`-th row. A stream is divided into blocks, and each block is shuffled by (seed, epoch, stream, block). A run
resumes exactly, and is refused with another number of workers or processes (`ImageTextDataModule.stream_settings`).

If rows can be counted without reading them (tar and Parquet files on disk), reading starts at the block of the current
position. Otherwise (JSON, the hub, compressed tar files) the earlier rows are read as well, but not decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ...common.errors import UserError
from ..base.decode import Decoder, decoding_by
from ..base.faults import BadSample, Fault, Outcome
from ..base.samples import ATTEMPTS, Transform
from ..base.sampling import block_order, sample_numbers, shard_order, substitute
from ..reading.stream import Stream, StreamedRow
from ..text.tokenizers import Encoder
from .samples import Sample, evaluation_outcome, training_sample


class Share(NamedTuple):
    """Rows that a stream reads in one pass: every `step`-th row of some shards, starting at row `first`."""

    shards: list[int]
    first: int
    step: int


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
    """

    decoder: Decoder = "pillow"

    def __init__(
        self,
        stream: Stream,
        transform: Transform,
        encoder: Encoder,
        seed: int,
        batch_size: int,
        batches: int,
        block: int,
        replicas: tuple[int, int],
        position: tuple[int, int],
    ) -> None:
        self.stream = stream
        self.transform = transform
        self.encoder = encoder
        self.seed = seed
        self.batch_size = batch_size
        self.batches = batches
        self.block = block
        self.replicas = replicas
        self.epoch, self.done = position

    def __iter__(self) -> Iterator[list[Outcome]]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        # The loader takes batches from the workers in turn and starts with worker 0, so that worker 0 continues the
        # stream that comes next at this position.
        stream = (worker + self.done) % workers
        count, rank = self.replicas
        mine = range(stream, self.batches, workers)
        done = len(range(stream, min(self.done, self.batches), workers))
        items = self._shuffled(rank * workers + stream, count * workers, done * self.batch_size)
        for _ in mine[done:]:
            with decoding_by(self.decoder):
                batch = [self._outcome(*next(items)) for _ in range(self.batch_size)]
            yield batch

    def _shuffled(self, number: int, streams: int, skipped: int) -> Iterator[tuple[int, list[StreamedRow]]]:
        """Yield pairs of a place in a block and the block, without end, and without the first `skipped` pairs.

        Args:
            number: index of the stream among all streams.
            streams: number of streams of all processes.
            skipped: number of pairs to skip.
        """
        block, left = 0, skipped
        for pass_number in itertools.count():
            share = self._share(pass_number, number, streams)
            known = self._count(share, left) if left else None
            if known and known <= left:
                left -= known
                block += -(-known // self.block)
                continue
            jumped = left // self.block if known else 0
            left -= jumped * self.block
            begun = block
            block += jumped
            for rows in self._blocks(share, jumped * self.block):
                if left < len(rows):
                    order = block_order(self.seed, self.epoch, number, block, len(rows)).tolist()
                    for place in order[left:]:
                        yield place, rows
                left = max(left - len(rows), 0)
                block += 1
            if block == begun:
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
        own = total = 0
        for shard in share.shards:
            count = self.stream.count(shard)
            if count is None:
                return None
            total += count
            own = max(0, -((share.first - total) // share.step))
            if own > enough:
                break
        return own

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
        wanted = share.first + skipped * share.step  # index in the current shard
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

    def _outcome(self, place: int, rows: list[StreamedRow]) -> Outcome:
        faults: list[Fault] = []
        first = rows[place]
        for attempt in range(ATTEMPTS):
            item = rows[substitute(self.seed, self.epoch, first.sample_index, attempt, len(rows))] if attempt else first
            try:
                if item.row.fault is not None:
                    raise BadSample(*item.row.fault)
                image, caption = training_sample(
                    self.stream.decoder(item),
                    item.row.captions,
                    self.encoder,
                    self.transform,
                    sample_numbers(self.seed, self.epoch, item.sample_index),
                    item.name,
                )
            except BadSample as bad:
                faults.append(bad.fault)
                continue
            return Outcome(Sample(image, [caption], self.stream.image_id(item), item.sample_index), attempt + 1, faults)
        return Outcome(None, ATTEMPTS, faults)


class StreamedEvaluationSet(IterableDataset[list[Outcome]]):
    """Dataset of the part of an evaluation split that this process evaluates.

    Over all processes, each image is evaluated exactly once. Each process reads all rows and decodes its own part. All
    processes have the same number of batches. Rows of the same image must be adjacent.

    Args:
        stream: shards of the split.
        transform: image to float [3, H, W].
        encoder: decides which captions are usable.
        seed: the run's seed.
        batch_size: images per process and batch.
        replicas: number of processes, and the index of this one.
        need_captions: whether an image without captions counts as unusable.
    """

    decoder: Decoder = "pillow"

    def __init__(
        self,
        stream: Stream,
        transform: Transform,
        encoder: Encoder,
        seed: int,
        batch_size: int,
        replicas: tuple[int, int],
        need_captions: bool,
    ) -> None:
        self.stream = stream
        self.transform = transform
        self.encoder = encoder
        self.seed = seed
        self.batch_size = batch_size
        self.replicas = replicas
        self.need_captions = need_captions

    def __iter__(self) -> Iterator[list[Outcome]]:
        count, _ = self.replicas
        whole = self.batch_size * count
        waiting: list[list[StreamedRow]] = []
        for image in self._images():
            waiting.append(image)
            # The last batch is held back until one more image per process is there, so that no process lacks an image.
            if len(waiting) == whole + count:
                yield self._outcomes(waiting[:whole])
                waiting = waiting[whole:]
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
        mine = np.array_split(np.arange(len(images)), count)[rank].tolist()
        with decoding_by(self.decoder):
            return [self._outcome(images[place]) for place in mine]

    def _outcome(self, rows: list[StreamedRow]) -> Outcome:
        if rows[0].row.fault is not None:  # a row with a fault has no id, so it is a group of its own
            return Outcome(None, 1, [rows[0].row.fault])
        return evaluation_outcome(
            self.stream.decoder(rows[0]),
            [caption for item in rows for caption in item.row.captions],
            rows[0].name,
            self.stream.image_id(rows[0]),
            rows[0].sample_index,
            self,
        )
