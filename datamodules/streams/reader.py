"""Reading of streamed rows in the order of `StreamOrder`: in threads of the main process, ahead of the loader workers.

Loader workers get the rows with their images still encoded, and decode them: a row is read once per process, however
many workers there are, and the workers have no position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from ...common.errors import UserError
from ..base.faults import BadSample, Fault, Outcome
from ..base.samples import ATTEMPTS, SeededSet
from ..base.sampling import sample_numbers, substitute
from ..reading.stream import Stream, StreamedRow
from .order import SEQUENTIAL, Run, StreamOrder

LOCAL_READS = 2
"""Number of reads of files on disks at the same time."""
REMOTE_READS = 32
"""Number of reads by URL at the same time, since each waits for the network."""


class StreamKey(NamedTuple):
    """A row of a training batch.

    Attributes:
        epoch: the epoch, which persistent workers do not know otherwise.
        turn: number of times that the epoch read the shard before, at most.
        choices: number of rows at the start of the shard that the row is replaced from if it is bad.
        item: the row.
    """

    epoch: int
    turn: int
    choices: int
    item: StreamedRow


@dataclass(eq=False)
class StreamedSet(SeededSet):
    """Dataset of streamed training samples by `StreamKey`; bad rows are replaced by others of their shards.

    The substitute is drawn from (seed, epoch, row, attempt), so that it does not depend on who reads the row.

    Args:
        stream: shards of the split.
        read: returns the sample of a row with its random numbers, as in `Reader`; raises `BadSample`.
        seed: the run's seed.
    """

    stream: Stream
    read: Callable[[StreamedRow, tuple[int, int]], Any]
    seed: int

    def __getitem__(self, key: StreamKey) -> Outcome:
        epoch, turn, choices, item = key
        planned = _repeated(item.sample_index, turn)
        faults: list[Fault] = []
        for attempt in range(ATTEMPTS):
            if attempt:
                row = substitute(self.seed, epoch, planned, attempt, choices)
                item = self.stream.row(item.sample_index >> 32, row)
            try:
                sample = self.read(item, sample_numbers(self.seed, epoch, _repeated(item.sample_index, turn)))
            except BadSample as bad:
                faults.append(bad.fault)
                continue
            return Outcome(sample, attempt + 1, faults)
        return Outcome(None, ATTEMPTS, faults)


def _repeated(sample_index: int, turn: int) -> int:
    """Return the number of a row whose repetitions in an epoch have their own draws."""
    return sample_index | turn << 64


@dataclass(eq=False)
class StreamBatchSampler:
    """Batch sampler of `StreamKey`s for this process: it yields the rows themselves, which it reads ahead.

    Args:
        stream: shards of the split.
        seed: the run's seed.
        batch_size: rows per process and batch.
        batches: number of batches in a full epoch.
        block: least number of rows that are shuffled together.
        replicas: number of processes, and the index of this one.
        position: returns epoch, and number of batches that were already done in it; called at the first batch.
        temperature: as `mixing_temperature` of the datamodules.
        frozen: returns whether each epoch has the order of the first.
    """

    stream: Stream
    seed: int
    batch_size: int
    batches: int
    block: int
    replicas: tuple[int, int]
    position: Callable[[], tuple[int, int]]
    temperature: float = 1.0
    frozen: Callable[[], bool] = lambda: False

    def __len__(self) -> int:
        """Return the number of batches in a full epoch, even if the next pass starts later."""
        return self.batches

    def __iter__(self) -> Iterator[list[StreamKey]]:
        epoch, done = self.position()
        count, rank = self.replicas
        order = StreamOrder(
            self.stream,
            self.seed,
            0 if self.frozen() else epoch,
            self.batches,
            self.batch_size * count,
            self.block,
            self.temperature,
        )
        slots = range(rank * self.batch_size, (rank + 1) * self.batch_size)
        reading = BlockReader(self.stream, order, slots, self.replicas)
        try:
            coming = reading.start(done) if done < self.batches else None
            while coming is not None:
                _, first, depth = order.block_of(done)
                rows = reading.rows(coming)
                coming = reading.start(first + depth) if first + depth < self.batches else None
                places = order.places(done)[slots.start : slots.stop]
                for batch in range(done - first, depth):
                    yield [
                        StreamKey(epoch, *rows[slot * depth + place])
                        for slot, place in enumerate(places[:, batch].tolist())
                    ]
                done = first + depth
        finally:
            reading.close()


Read = tuple[int, int, StreamedRow]
"""Turn, choices and row, as in `StreamKey`."""
Part = tuple["Future[list[list[Read]]]", int]
"""The rows of some runs that are read one after another, and the place of one of these runs among them."""


class BlockReader:
    """Reads the rows of some slots block by block, the next one while the batches of the last are made.

    Args:
        stream: shards of the split.
        order: order of the rows.
        slots: the slots of this process.
        replicas: number of processes, and the index of this one.
    """

    def __init__(self, stream: Stream, order: StreamOrder, slots: range, replicas: tuple[int, int]) -> None:
        self.stream = stream
        self.order = order
        self.slots = slots
        self.replicas = replicas
        reads = REMOTE_READS if self.stream.is_remote() else LOCAL_READS
        self._planning = ThreadPoolExecutor(1, "stream-order")
        self._reading = ThreadPoolExecutor(reads, "stream-rows")
        self._counting = ThreadPoolExecutor(reads, "stream-counts")
        self._cursors: dict[tuple[int, int, int], Cursor] = {}
        order.counted = self.count
        order.announced = self.announce

    def start(self, batch: int) -> Future[list[Part]]:
        """Begin to read the block of a batch; blocks are begun in ascending order."""
        return self._planning.submit(self._plan, batch)

    def rows(self, started: Future[list[Part]]) -> list[Read]:
        """Return the rows of a block, in the order of the sequence.

        Raises:
            UserError: If rows cannot be read.
        """
        return [row for part, place in started.result() for row in part.result()[place]]

    def close(self) -> None:
        """End the threads; reads that have begun are finished in them."""
        for pool in (self._planning, self._counting, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    def count(self, shards: list[int]) -> list[int]:
        """Return the numbers of rows of shards, which are counted at the same time."""
        processes, rank = self.replicas
        started = {}
        for first in range(processes):  # each process begins with others, whose offsets it caches for all
            for shard in shards[(rank + first) % processes :: processes]:
                if shard not in started:
                    started[shard] = self._counting.submit(self.stream.count, shard)
        return [started[shard].result() for shard in shards]

    def announce(self, shards: list[int]) -> None:
        """Begin to count shards that are read later."""
        for shard in shards:
            self._counting.submit(self.stream.count, shard)

    def _plan(self, batch: int) -> list[Part]:
        runs = self.order.runs(batch, self.slots)
        groups: dict[tuple[int, int, int], list[Run]] = {}
        places: list[tuple[tuple[int, int, int], int]] = []
        for run in runs:
            group = groups.setdefault(run[:3], [])
            places.append((run[:3], len(group)))
            group.append(run)
        # A chunk may go on in the next block; a shard that is read from its start on goes on later too.
        kept = [key for key in self._cursors if key[2] < 0 and key not in groups][-SEQUENTIAL:]
        self._cursors = {key: self._cursors.get(key) or Cursor(self.stream) for key in (*kept, *groups)}
        parts = {key: self._reading.submit(self._cursors[key].read, group) for key, group in groups.items()}
        return [(parts[key], place) for key, place in places]


class Cursor:
    """Reads the rows of a chunk, or of a shard that can only be read from its start on, one run after another."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._lock = Lock()
        self._position = 0
        self._rows: Iterator[StreamedRow] | None = None

    def read(self, runs: list[Run]) -> list[list[Read]]:
        """Return the rows of each run.

        Raises:
            UserError: If they cannot be read.
        """
        with self._lock:
            return [self._read(run) for run in runs]

    def _read(self, run: Run) -> list[Read]:
        try:
            rows = self._of(run)
        except OSError as error:
            if isinstance(error, UserError):
                raise
            name = self.stream.image_name(run.shard << 32 | run.start)
            raise UserError(
                f"Expected to read {name}, got an error ({error}): check the file; a run resumes from its last "
                "checkpoint."
            ) from error
        if len(rows) != run.stop - run.start:
            name = self.stream.image_name(run.shard << 32 | run.start)
            raise UserError(
                f"Expected {run.stop - run.start} rows from {name} on, got {len(rows)}: the file has changed since it "
                "was counted; start the run again."
            )
        return [(run.turn, run.choices, row) for row in rows]

    def _of(self, run: Run) -> list[StreamedRow]:
        if self.stream.chunk_starts(run.shard) is None and not self.stream.is_sequential(run.shard):
            return list(self.stream.rows(run.shard, run.start, run.stop))
        if self._rows is None or run.start < self._position:
            self._rows = self.stream.rows(run.shard, run.start)
            self._position = run.start
        rows = list(itertools.islice(self._rows, run.start - self._position, run.stop - self._position))
        self._position = run.stop
        return rows
