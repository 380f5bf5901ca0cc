"""Splits that are read on the fly: order and position are functions of counters here too, never of a refilled buffer.

A *stream* is what one loader worker of one process reads: with ``W`` workers in each of ``N`` processes there are
``N*W``. Each pass over the data deals the shards, in an order drawn from (seed, epoch, pass), to the streams; where
there are fewer shards than streams, all read all shards and keep every ``N*W``-th row. A stream is cut into blocks, and
each block shuffled by (seed, epoch, stream, block). So a run continues exactly with the same number of workers.

Where rows can be counted without reading them (tar and Parquet files on disk), it begins to read at the block that the
position is in. Elsewhere (JSON, the hub, compressed tar files) the rows before it are read too, but not decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..core.decode import BadSample, Fault, decode_image
from ..core.samples import ATTEMPTS, Outcome, Sample, Transform, evaluation_outcome, training_sample
from ..core.sampling import block_order, sample_words, shard_order, substitute
from ..text.tokenizers import Encoder, text_id, usable_caption
from .streamed import StreamedSource
from .table import PROBED_ROWS, Layout, Row, identity_number

TOKENIZER_ROWS = 100_000  # a stream may have no end


class StreamedRow(NamedTuple):
    """One row, not decoded, and its number: the shard's times 2**32 plus the place in the shard."""

    row: Row
    sample_index: int
    name: str


class Stream:
    """The shards of one or several streamed sources.

    Args:
        parts: the sources, and how to read their rows.
        max_pixels: larger images are refused.
    """

    def __init__(self, parts: Sequence[tuple[StreamedSource, Layout]], max_pixels: int) -> None:
        self.parts = list(parts)
        self.max_pixels = max_pixels
        self.shards = [(part, shard) for part, (source, _) in enumerate(parts) for shard in range(source.num_shards)]

    def count(self, shard: int) -> int | None:
        """Rows of a shard, None where only reading them would tell."""
        part, number = self.shards[shard]
        return self.parts[part][0].count(number)

    def rows(self, shard: int, start: int = 0) -> Iterator[StreamedRow]:
        """The rows of one shard from one on, in their order."""
        part, number = self.shards[shard]
        source, layout = self.parts[part]
        for place, values in enumerate(source.rows(number, start), start):
            index = shard << 32 | place
            name = self.picture_name(index)
            yield StreamedRow(layout.row(values, name), index, name)

    def picture_name(self, sample_index: int) -> str:
        """Source, shard and row of an image; its path is known only while the row is read."""
        part, shard = self.shards[sample_index >> 32]
        return f"{self.parts[part][1].origin}, shard {shard}, row {sample_index & 0xFFFFFFFF}"

    def all_rows(self) -> Iterator[StreamedRow]:
        """All rows of all shards."""
        for shard in range(len(self.shards)):
            yield from self.rows(shard)

    def image_id(self, item: StreamedRow) -> int:
        """Equal for rows that show one image."""
        identity = item.row.image_id
        if identity is not None:
            several = len(self.parts) > 1
            return identity_number(identity, self.shards[item.sample_index >> 32][0] if several else None)
        if item.row.data is None and item.row.path is not None:
            return text_id(item.row.path)
        return item.sample_index

    def decoder(self, item: StreamedRow) -> Callable[[], Any]:
        """A function that decodes a row's image; it raises :class:`BadSample`."""
        data, path, name = item.row.data, item.row.path, item.name

        def decoded() -> Any:
            if item.row.fault is not None:
                raise BadSample(*item.row.fault)
            if data is None and path:
                self.parts[self.shards[item.sample_index >> 32][0]][1].check_inside(path)
            return decode_image(data, path, path if data is None and path else name, self.max_pixels)

        return decoded

    def texts(self) -> Iterator[str]:
        """The captions of the first rows, to train a tokenizer on."""
        for number, item in enumerate(self.all_rows()):
            if number == TOKENIZER_ROWS:
                return
            yield from item.row.captions

    def check(self, split: str, need_captions: bool, clean: bool, max_words: int) -> None:
        """Fail where none of the first rows can be used.

        Raises:
            ValueError: naming what was found.
        """
        origins = ", ".join(repr(layout.origin) for _, layout in self.parts)
        tried, faults = 0, list[Fault]()
        for item in self.all_rows():
            if tried == PROBED_ROWS:
                break
            tried += 1
            if item.row.fault is not None:
                faults.append(item.row.fault)
                continue
            if need_captions and not any(usable_caption(text, clean, max_words) for text in item.row.captions):
                faults.append(Fault("empty caption", item.name))
                continue
            try:
                self.decoder(item)()
                return
            except BadSample as bad:
                faults.append(bad.fault)
        if not tried:
            raise ValueError(f"found no rows in the {split} split ({origins}), expected some: check the path")
        raise ValueError(
            f"found no usable row among the first {tried} of the {split} split ({origins}), the first because of "
            f"'{faults[0].cause}' in {faults[0].name}, "
            "expected images with captions: check data.image_root and the column names"
        )


class Share(NamedTuple):
    """What a stream reads in one pass: every ``step``-th row, from ``first`` on, of some shards one after another."""

    shards: list[int]
    first: int
    step: int


class StreamedTrainingSet(IterableDataset[list[Outcome]]):
    """Yields this process's batches from a position on.

    Args:
        stream: the shards.
        transform: image to float [3, H, W].
        encoder: tells which captions are usable.
        seed: the run's seed.
        batch_size: rows per process and batch.
        batches: batches in a full epoch.
        block: rows shuffled together.
        replicas: processes, and which of them this is.
        position: (epoch, batches of it already done).
    """

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
        # The loader takes batches from the workers in turn, beginning with worker 0: it stands in for the one whose
        # turn it is at this position.
        turn = (worker + self.done) % workers
        count, rank = self.replicas
        mine = range(turn, self.batches, workers)
        done = len(range(turn, min(self.done, self.batches), workers))
        items = self._shuffled(rank * workers + turn, count * workers, done * self.batch_size)
        for _ in mine[done:]:
            yield [self._outcome(*next(items)) for _ in range(self.batch_size)]

    def _shuffled(self, number: int, streams: int, left: int) -> Iterator[tuple[int, list[StreamedRow]]]:
        """Pairs of a place and the block that it is a place in, without an end; as many as are `left` are left out."""
        block = 0
        for turn in itertools.count():
            share = self._share(turn, number, streams)
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
                raise ValueError(
                    f"found no rows for stream {number} of {streams} (loader workers of all processes), expected at "
                    "least one each: lower num_workers"
                )

    def _share(self, turn: int, number: int, streams: int) -> Share:
        """What a stream reads in the `turn`-th pass."""
        order = shard_order(self.seed, self.epoch, turn, len(self.stream.shards)).tolist()
        return Share(order[number::streams], 0, 1) if len(order) >= streams else Share(order, number, streams)

    def _count(self, share: Share, enough: int) -> int | None:
        """Rows of a share, counted until they are more than enough; None where only reading them would tell."""
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
        """The rows of a share, cut into blocks, without the first ones."""
        rows: list[StreamedRow] = []
        for item in self._rows(share, skipped):
            rows.append(item)
            if len(rows) == self.block:
                yield rows
                rows = []
        if rows:
            yield rows

    def _rows(self, share: Share, skipped: int) -> Iterator[StreamedRow]:
        """The rows of a share without the first ones, of which none is read."""
        wanted = share.first + skipped * share.step  # counted from the beginning of the shard
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
                    sample_words(self.seed, self.epoch, item.sample_index),
                    item.name,
                )
            except BadSample as bad:
                faults.append(bad.fault)
                continue
            return Outcome(Sample(image, [caption], self.stream.image_id(item), item.sample_index), attempt + 1, faults)
        return Outcome(None, ATTEMPTS, faults)


class StreamedEvaluationSet(IterableDataset[list[Outcome]]):
    """Yields this process's share of an evaluation split: each image once over all processes, none twice.

    Every process reads all rows and decodes its own. All get the same number of batches. Rows of one image must be
    neighbours.

    Args:
        stream: the shards.
        transform: image to float [3, H, W].
        encoder: tells which captions are usable.
        seed: the run's seed.
        batch_size: images per process and batch.
        replicas: processes, and which of them this is.
        need_captions: whether an image without captions counts as unusable.
    """

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
            # Held back until what would be left is enough to give each process one.
            if len(waiting) == whole + count:
                yield self._outcomes(waiting[:whole])
                waiting = waiting[whole:]
        if len(waiting) < count:
            raise ValueError(
                f"found {len(waiting)} image(s) to evaluate but {count} processes, expected at least one each: "
                "use fewer devices or a larger split"
            )
        yield self._outcomes(waiting)

    def _images(self) -> Iterator[list[StreamedRow]]:
        group: list[StreamedRow] = []
        finished: set[int] = set()
        current = 0
        for item in self.stream.all_rows():
            if item.row.fault is not None:
                yield [item]  # perhaps between two rows of one image
                continue
            identity = self.stream.image_id(item)
            if group and identity != current:
                finished.add(current)
                yield group
                group = []
            if identity in finished:
                raise ValueError(
                    f"found the image id {item.row.image_id!r} again in {item.name}, expected rows of one image "
                    "next to each other in a streamed split: sort the file, or set streaming to false"
                )
            current = identity
            group.append(item)
        if group:
            yield group

    def _outcomes(self, images: list[list[StreamedRow]]) -> list[Outcome]:
        count, rank = self.replicas
        mine = np.array_split(np.arange(len(images)), count)[rank].tolist()
        return [self._outcome(images[place]) for place in mine]

    def _outcome(self, rows: list[StreamedRow]) -> Outcome:
        if rows[0].row.fault is not None:  # such a row has no id, and is alone
            return Outcome(None, 1, [rows[0].row.fault])
        return evaluation_outcome(
            self.stream.decoder(rows[0]),
            [caption for item in rows for caption in item.row.captions],
            rows[0].name,
            self.stream.image_id(rows[0]),
            rows[0].sample_index,
            self,
        )
