"""Order of the rows of a streamed epoch: a function of (seed, epoch, position), whatever processes and workers read it.

Each step narrows down which row is at a position:

1. *Passes.* An epoch reads its shards in passes. The order of the shards in a pass is drawn from (seed, epoch, pass);
   by its weight, or by the temperature of the mixture, a shard is in it several times or not at all.
2. *Windows.* The shards of a pass are divided into windows of at most `WINDOW` shards, which have to be counted before
   their rows are read. The first pass of a run begins with small windows: training starts while later shards are
   counted.
3. *Chunks.* A shard is cut into chunks of consecutive rows, which are read at once. The chunks of all shards of a
   window are in an order drawn from (seed, epoch, pass, window); of a shard that can only be read from its start they
   keep their own order. This is the *sequence* of rows, over all windows and passes.
4. *Blocks.* `depth` global batches of G rows are a block and have the next `depth * G` rows of the sequence. Slot `g`
   of the batches has rows `g * depth` to `(g + 1) * depth` of them, one for each batch, in an order drawn from (seed,
   epoch, block). The last block of an epoch has as many batches as are left.

Process `r` of `N` has slots `r * G / N` to `(r + 1) * G / N`, and so reads consecutive rows of the sequence, whole
chunks but for two. No row is read twice in a pass, and an epoch that is as long as a pass reads each row once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ...common.errors import UserError
from ..base.mixing import Mix, tempered
from ..base.sampling import block_order, chunk_generator, shard_generator

ORDER = 2
"""Version of the order, in checkpoints: with another one a run cannot go on. Version 1 divided shards among workers."""
WINDOW = 4096
"""Most shards whose chunks are in random order together."""
FIRST_WINDOW = 8
"""Number of shards in the first window of a run: they are counted before training. Each window has `GROWTH` as many."""
GROWTH = 4
SEQUENTIAL = 64
"""Most shards without random access that are read at the same time, each of which is an open file."""
CHUNKS = 128
"""Number of chunks of a block, where shards can be cut anywhere; more of them shuffle better, but are more reads."""
LONGEST_CHUNK = 32
"""Most rows of a chunk where shards can be cut anywhere."""
LEAST_DEPTH = 4
"""Least number of batches that are shuffled together."""


class Sharded(Protocol):
    """Shards of several sources, as the order of their rows needs them."""

    mix: Mix  # number and weight of the shards of each source

    def count(self, shard: int) -> int:
        """Return the number of rows of a shard."""

    def chunk_starts(self, shard: int) -> np.ndarray | None:
        """Return the rows at which a shard may be cut, int64 [n], the first of them 0; None if it may be anywhere."""

    def is_sequential(self, shard: int) -> bool:
        """Return whether a shard can only be read from its start on."""


class Entry(NamedTuple):
    """A shard in a pass.

    Attributes:
        shard: index of the shard.
        turn: number of times that the epoch read it before, at most; different for each of them.
        rows: number of rows that are read of it; None for all.
    """

    shard: int
    turn: int
    rows: int | None = None


class Run(NamedTuple):
    """Consecutive rows `start` to `stop` of a shard, all in one chunk.

    Attributes:
        shard: index of the shard.
        turn: as in `Entry`.
        chunk: first row of the chunk; -1 for a shard that can only be read from its start on.
        start: first row.
        stop: row after the last one.
        choices: number of rows of the shard that a bad row is replaced from.
    """

    shard: int
    turn: int
    chunk: int
    start: int
    stop: int
    choices: int


SUBSTITUTES = 1024
"""Number of first rows of a shard without random access that a bad row is replaced from."""


@dataclass
class Window:
    """Rows of some shards of a pass.

    Args:
        start: position of the first row in the sequence.
        entries: the shards.
        counts: number of rows that are read of each.
        seeds: counters of the order of the chunks: seed, epoch, pass and window.
    """

    start: int
    entries: Sequence[Entry]
    counts: Sequence[int]
    seeds: tuple[int, int, int, int]
    _chunks: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + sum(self.counts)

    def runs(self, stream: Sharded, first: int, stop: int, rows: int) -> Iterator[Run]:
        """Yield the runs at some positions of the sequence, in their order; chunks have `rows` rows if they can."""
        if self._chunks is None:
            self._chunks = self._cut(stream, rows)
        owners, starts, sizes, ends = self._chunks
        at = int(np.searchsorted(ends, first - self.start, side="right"))
        while first < stop:
            end = self.start + int(ends[at])
            before = end - int(sizes[at])
            chunk = int(starts[at])
            shard, turn, _ = self.entries[owners[at]]
            last = min(stop, end)
            sequential = stream.is_sequential(shard)
            choices = stream.count(shard)
            yield Run(
                shard,
                turn,
                -1 if sequential else chunk,
                chunk + first - before,
                chunk + last - before,
                min(choices, SUBSTITUTES) if sequential else choices,
            )
            first = last
            at += 1

    def _cut(self, stream: Sharded, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return entry, first row and number of rows of the chunks, and the position after each, int64 [chunks]."""
        draw = chunk_generator(*self.seeds)
        starts = [self._starts(stream, entry, count, rows, draw) for entry, count in zip(*self._read, strict=True)]
        owners = np.repeat(np.arange(len(starts)), [len(part) for part in starts])
        sizes = [np.diff(part, append=count) for part, count in zip(starts, self.counts, strict=True)]
        order = draw.permutation(len(owners))
        sequential = [number for number, entry in enumerate(self.entries) if stream.is_sequential(entry.shard)]
        if sequential:
            # Few of these shards at a time, and the chunks of each in their own order.
            ranks = np.full(len(self.entries), -1)
            ranks[sequential] = np.arange(len(sequential)) // SEQUENTIAL
            positions = np.flatnonzero(ranks[owners[order]] >= 0)
            order[positions] = order[positions][np.argsort(ranks[owners[order[positions]]], kind="stable")]
            for number in sequential:
                chunks = positions[owners[order[positions]] == number]
                order[chunks] = np.sort(order[chunks])
        chosen = np.concatenate(sizes)[order]
        return owners[order], np.concatenate(starts)[order], chosen, np.cumsum(chosen)

    @property
    def _read(self) -> tuple[Sequence[Entry], Sequence[int]]:
        return self.entries, self.counts

    @staticmethod
    def _starts(stream: Sharded, entry: Entry, count: int, rows: int, draw: np.random.Generator) -> np.ndarray:
        """Return the first rows of the chunks of a shard, int64 [chunks]."""
        if not count:
            return np.arange(0)
        cuts = stream.chunk_starts(entry.shard)
        if cuts is None:
            # From another row on in each epoch, so that other rows are beside each other.
            return np.concatenate([[0], np.arange(int(draw.integers(1, rows + 1)), count, rows)])
        chosen = [0]
        for cut in cuts[cuts < count].tolist():
            if cut - chosen[-1] >= rows:
                chosen.append(cut)
        return np.array(chosen)


@dataclass
class StreamOrder:
    """Order of the rows of an epoch.

    Args:
        stream: the shards.
        seed: the run's seed.
        epoch: the epoch.
        batches: number of global batches of the epoch.
        global_batch: rows per batch of all processes together, G.
        block: least number of rows that are shuffled together.
        temperature: as `mixing_temperature` of the datamodules; if it is not 1, all shards are counted first.
        counted: returns the number of rows of shards, at once or one after another.
        announced: called with the shards of the window after the one that is read, which may be counted meanwhile.
    """

    stream: Sharded
    seed: int
    epoch: int
    batches: int
    global_batch: int
    block: int
    temperature: float = 1.0
    counted: Callable[[list[int]], list[int]] | None = None
    announced: Callable[[list[int]], None] = lambda shards: None
    _windows: list[Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.depth = max(LEAST_DEPTH, -(-self.block // self.global_batch))
        self.chunk = min(max(self.depth * self.global_batch // CHUNKS, 1), LONGEST_CHUNK)
        self._coming = self._each_window()

    def block_of(self, batch: int) -> tuple[int, int, int]:
        """Return the number of the block of a batch, its first batch, and the number of its batches."""
        number = batch // self.depth
        first = number * self.depth
        return number, first, min(self.depth, self.batches - first)

    def runs(self, batch: int, slots: range) -> list[Run]:
        """Return the rows of some slots of the batches of a block, which begins with a batch, in their order.

        Blocks are asked for in ascending order.

        Raises:
            UserError: If the shards have no rows.
        """
        _, first, depth = self.block_of(batch)
        start = first * self.global_batch + slots.start * depth
        stop = start + len(slots) * depth
        while not self._windows or self._windows[-1].stop < stop:
            self._windows.append(next(self._coming))
            self._windows = [window for window in self._windows if window.stop > start] or self._windows[-1:]
        found: list[Run] = []
        for window in self._windows:
            begin, end = max(start, window.start), min(stop, window.stop)
            if begin < end:
                found += window.runs(self.stream, begin, end, self.chunk)
        return found

    def places(self, batch: int) -> np.ndarray:
        """Return which of its rows each slot gives to each batch of a block, int64 [slots, batches]."""
        number, _, depth = self.block_of(batch)
        return block_order(self.seed, self.epoch, number, self.global_batch, depth)

    def entries(self, number: int) -> list[Entry]:
        """Return the shards of a pass in their order."""
        draw = shard_generator(self.seed, self.epoch, number)
        mix = self.stream.mix
        if self.temperature != 1:
            return self._tempered_entries(number, draw)
        repetitions = int(np.ceil(max(mix.weights or [1.0])))
        order = mix.order(draw)
        turns = order // mix.rows + number * repetitions
        return [Entry(shard, turn) for shard, turn in zip((order % mix.rows).tolist(), turns.tolist(), strict=True)]

    def _tempered_entries(self, number: int, draw: np.random.Generator) -> list[Entry]:
        """Return the shards of a pass in which the sources have their shares of the rows; of some the first rows."""
        sizes = self.stream.mix.sizes
        ends = np.cumsum([0, *sizes]).tolist()
        counts = self._count(list(range(ends[-1])))
        totals = [sum(counts[start:end]) for start, end in itertools.pairwise(ends)]
        mix = tempered(Mix(totals, self.stream.mix.weights), self.temperature)
        repetitions = max(-(-rows // max(total, 1)) for rows, total in zip(mix.counts, totals, strict=True))
        entries: list[Entry] = []
        for start, end, total, rows in zip(ends, ends[1:], totals, mix.counts, strict=False):
            for turn in range(-(-rows // max(total, 1))):
                for shard in (start + draw.permutation(end - start)).tolist():
                    taken = min(counts[shard], rows)
                    rows -= taken
                    if taken:
                        entries.append(Entry(shard, number * repetitions + turn, taken))
        return [entries[position] for position in draw.permutation(len(entries)).tolist()]

    def _each_window(self) -> Iterator[Window]:
        start = 0
        for number in itertools.count():
            before = start
            entries = self.entries(number)
            groups = list(_groups(entries, self.epoch == 0 and number == 0))
            for place, group in enumerate(groups):
                if place + 1 < len(groups):
                    self.announced([entry.shard for entry in groups[place + 1]])
                counts = self._count([entry.shard for entry in group])
                read = [
                    count if entry.rows is None else min(count, entry.rows)
                    for count, entry in zip(counts, group, strict=True)
                ]
                window = Window(start, group, read, (self.seed, self.epoch, number, place))
                start = window.stop
                yield window
            if start == before:
                raise UserError("Expected at least one row in the streamed shards, got none: check the files.")

    def _count(self, shards: list[int]) -> list[int]:
        return [self.stream.count(shard) for shard in shards] if self.counted is None else self.counted(shards)


def _groups(entries: list[Entry], growing: bool) -> Iterator[list[Entry]]:
    """Yield the entries of the windows of a pass, in windows that are at first smaller if `growing`."""
    start = 0
    size = FIRST_WINDOW
    while growing and size < WINDOW and len(entries) - start > 2 * size:
        yield entries[start : start + size]
        start += size
        size *= GROWTH
    rest = entries[start:]
    if rest:
        ends = np.linspace(0, len(rest), -(-len(rest) // WINDOW) + 1).astype(int).tolist()
        yield from (rest[first:last] for first, last in itertools.pairwise(ends))
