"""The order of a stream is a function of (seed, epoch, position), and reads each row of a pass once."""

import itertools
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from vlightning.common.errors import UserError
from vlightning.datamodules.base.mixing import Mix
from vlightning.datamodules.streams import order as orders
from vlightning.datamodules.streams.order import StreamOrder


class Shards:
    """Shards of one or several sources, with the number of rows of each; some shards have row groups or no index."""

    def __init__(self, sources, weights=None, groups=None, sequential=()):
        self.counts = [count for source in sources for count in source]
        self.mix = Mix([len(source) for source in sources], weights)
        self.groups = groups
        self.sequential = set(sequential)
        self.counted = []

    def count(self, shard):
        self.counted.append(shard)
        return self.counts[shard]

    def chunk_starts(self, shard):
        if self.groups is None or shard in self.sequential:
            return None
        return np.arange(0, self.counts[shard], self.groups)

    def is_sequential(self, shard):
        return shard in self.sequential


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def batches(shards, batches, processes, global_batch, block=16, seed=3, epoch=1, start=0, **options):
    """The rows (shard, row, turn) of each global batch from a batch on, put together from what each process reads."""
    size = global_batch // processes
    parts = []
    for rank in range(processes):
        order = StreamOrder(shards, seed, epoch, batches, global_batch, block, **options)
        slots = range(rank * size, (rank + 1) * size)
        read, done = [], start
        while done < batches:
            _, first, depth = order.block_of(done)
            rows = [(run.shard, row, run.turn) for run in order.runs(done, slots) for row in range(run.start, run.stop)]
            places = order.places(done)[slots.start : slots.stop]
            for batch in range(done - first, depth):
                read.append([rows[slot * depth + place] for slot, place in enumerate(places[:, batch])])
            done = first + depth
        parts.append(read)
    return [flat(pieces) for pieces in zip(*parts, strict=True)]


SIZES = st.lists(st.lists(st.integers(0, 23), min_size=1, max_size=5), min_size=1, max_size=3).filter(
    lambda sources: any(map(sum, sources))
)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.sampled_from([1, 2, 3, 4]), st.integers(1, 40), st.integers(0, 50), st.sampled_from([None, 3, 7, 100]))
def test_the_order_is_the_same_for_any_number_of_processes_and_any_start(sources, processes, block, start, groups):
    total = sum(map(sum, sources))
    sequential = range(0, len(flat(sources)), 3)
    shards = Shards(sources, groups=groups, sequential=sequential)
    count = 2 * total // 12 + 3  # more than a pass
    whole = batches(shards, count, 1, 12, block)
    assert len(whole) == count
    assert batches(shards, count, processes, 12, block, start=start) == whole[start:]


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 9), st.integers(1, 60), st.sampled_from([None, 3, 7, 100]), st.integers(0, 2))
def test_an_epoch_as_long_as_a_pass_reads_each_row_once(sources, global_batch, block, groups, epoch):
    total = sum(map(sum, sources))
    shards = Shards(sources, groups=groups, sequential=range(1, len(flat(sources)), 2))
    read = flat(batches(shards, total // global_batch, 1, global_batch, block, epoch=epoch))
    every = {(shard, row) for shard, count in enumerate(shards.counts) for row in range(count)}
    assert len(read) == total // global_batch * global_batch
    assert {row[:2] for row in read} <= every
    assert max(Counter(read).values(), default=1) == 1


def test_shards_of_more_than_a_window_are_read_once_too(monkeypatch):
    monkeypatch.setattr(orders, "WINDOW", 3)
    monkeypatch.setattr(orders, "FIRST_WINDOW", 1)
    shards = Shards([[5, 1, 0, 7, 3, 4, 9, 2, 6, 8, 5]])
    for epoch in (0, 1):
        read = flat(batches(shards, 25, 1, 2, epoch=epoch))
        assert len(set(read)) == 50
        assert batches(shards, 25, 2, 2, epoch=epoch, start=13) == batches(shards, 25, 1, 2, epoch=epoch)[13:]


def test_only_the_shards_of_the_first_windows_are_counted_before_the_first_batch():
    shards = Shards([[1000] * 500])
    order = StreamOrder(shards, 0, 0, 100, 64, 1024)
    order.runs(0, range(64))
    assert len(set(shards.counted)) == orders.FIRST_WINDOW


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([[1, 2, 1], [3, 1, 0.5], [0.5, 0.5, 2]]), st.integers(0, 3))
def test_a_pass_reads_the_rows_of_each_source_as_often_as_it_weighs(weights, epoch):
    sources = [[6, 5], [4, 9], [8, 8]]
    shards = Shards(sources, weights)
    entries = StreamOrder(shards, 3, epoch, 60, 2, 16).entries(0)
    owners = Counter(entry.shard // 2 for entry in entries)
    assert all(owners[source] == int(2 * weight) for source, weight in enumerate(weights))
    rows = sum(shards.counts[entry.shard] for entry in entries)
    read = flat(batches(shards, rows, 1, 1, epoch=epoch))
    times = Counter(row[:2] for row in read)
    assert max(Counter(read).values()) == 1  # repetitions have draws of their own
    chosen = Counter(entry.shard for entry in entries)
    assert times == {(shard, row): chosen[shard] for shard in chosen for row in range(shards.counts[shard])}


@pytest.mark.parametrize("temperature", [2.0, 5.0, float("inf")])
def test_at_a_temperature_the_sources_have_their_shares_of_a_pass(temperature):
    sources = [[30, 50, 20], [9, 1], [40]]
    shards = Shards(sources)
    sizes = [100, 10, 40]
    powers = [size ** (1 / temperature) for size in sizes]
    order = StreamOrder(shards, 3, 1, 75, 2, 16, temperature)
    read = Counter()
    for entry in order.entries(0):
        read[0 if entry.shard < 3 else 1 if entry.shard < 5 else 2] += entry.rows
    for place, power in enumerate(powers):
        assert abs(read[place] - 150 * power / sum(powers)) < 1
    whole = batches(shards, 75, 1, 2, temperature=temperature)
    rows = Counter(flat(whole))
    assert max(rows.values()) == 1
    assert Counter(0 if shard < 3 else 1 if shard < 5 else 2 for shard, _, _ in rows) == read
    assert batches(shards, 75, 2, 2, temperature=temperature, start=31) == batches(
        shards, 75, 1, 2, temperature=temperature, start=31
    )


def test_order_depends_on_seed_and_epoch():
    shards = Shards([[50, 50]])
    base = batches(shards, 20, 1, 4)
    assert batches(shards, 20, 1, 4) == base
    assert batches(shards, 20, 1, 4, seed=4) != base
    assert batches(shards, 20, 1, 4, epoch=2) != base


def test_a_batch_has_rows_of_many_places():
    shards = Shards([[1000] * 20])
    for batch in batches(shards, 40, 1, 64, block=1024):
        places = {(shard, row // 16) for shard, row, _ in batch}
        assert len(places) >= 45  # of at most 64


def test_a_process_reads_whole_chunks_but_for_two():
    shards = Shards([[1000] * 20], groups=100)
    order = StreamOrder(shards, 3, 1, 300, 256, 1024)
    for batch in range(0, 60, order.depth):
        runs = order.runs(batch, range(64, 128))
        assert sum(run.stop - run.start < 100 for run in runs) <= 2
        assert sum(run.stop - run.start for run in runs) == 64 * order.depth


def test_shards_without_rows_are_an_error():
    with pytest.raises(UserError, match="Expected at least one row in the streamed shards, got none"):
        StreamOrder(Shards([[0, 0]]), 0, 0, 1, 2, 16).runs(0, range(2))
