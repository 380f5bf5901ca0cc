import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from vlightning.common.errors import UserError
from vlightning.datamodules.base.mixing import Mix
from vlightning.datamodules.base.sampling import (
    TrainingBatchSampler,
    TrainingPosition,
    epoch_order,
    evaluation_batches,
    preserve_rng_states,
    sample_numbers,
    seeded,
    substitute,
)


def sampler(length=37, batch_size=4, seed=5, rank=0, world_size=1, trainer=None):
    batches = length // (batch_size * world_size)
    return TrainingBatchSampler(Mix([length]), batch_size, seed, rank, world_size, TrainingPosition(trainer, batches))


def fake_trainer(total, current, batches):
    counter = SimpleNamespace(total=SimpleNamespace(ready=total), current=SimpleNamespace(ready=current))
    return SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.FITTING, status=TrainerStatus.RUNNING),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=counter)),
        num_training_batches=batches,
        overfit_batches=0.0,
    )


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch():
    orders = [epoch_order(seed, epoch, Mix([50])) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert np.array_equal(epoch_order(1, 1, Mix([50])), orders[3])


def test_ranks_together_read_what_one_process_reads_in_each_global_batch():
    whole = list(sampler(length=53, batch_size=12).batches(3))
    assert len(whole) == 4
    for world_size in (2, 3, 4, 6):
        parts = [
            list(sampler(53, 12 // world_size, rank=rank, world_size=world_size).batches(3))
            for rank in range(world_size)
        ]
        for number, expected in enumerate(whole):
            assert [key for part in parts for key in part[number]] == expected


def test_no_row_is_read_twice_in_an_epoch():
    for rank, world_size in ((0, 1), (1, 3)):
        rows = [row for batch in sampler(61, 5, rank=rank, world_size=world_size) for _, row in batch]
        assert len(set(rows)) == len(rows) == 61 // (5 * world_size) * 5


def test_without_a_trainer_each_pass_is_the_next_epoch():
    loader = sampler()
    passes = [list(loader), list(loader)]
    assert {epoch for batch in passes[0] for epoch, _ in batch} == {0}
    assert {epoch for batch in passes[1] for epoch, _ in batch} == {1}
    assert [row for batch in passes[0] for _, row in batch] != [row for batch in passes[1] for _, row in batch]


@pytest.mark.parametrize("limit", [9, 5, 1])
def test_the_position_comes_from_the_batch_counter(limit):
    for total in range(3 * limit):
        loader = sampler(trainer=fake_trainer(total, total % limit, limit))
        epoch, done = divmod(total, limit)
        assert list(loader) == list(sampler().batches(epoch))[done:]
        assert len(loader) == 9


def test_an_epoch_cut_short_is_followed_by_a_fresh_one():
    # 9 batches an epoch; epoch 1 ended after 4, then 2 batches of the next were done.
    loader = sampler(trainer=fake_trainer(9 + 4, 0, 9))
    assert list(loader) == list(sampler().batches(2))
    loader = sampler(trainer=fake_trainer(9 + 4 + 2, 2, 9))
    assert list(loader) == list(sampler().batches(2))[2:]


def test_overfitting_keeps_the_rows_but_not_the_augmentation():
    trainer = fake_trainer(9, 0, 9)
    trainer.overfit_batches = 2
    keys = next(iter(sampler(trainer=trainer)))
    assert [row for _, row in keys] == [row for _, row in next(iter(sampler().batches(0)))]
    assert {epoch for epoch, _ in keys} == {1}


@pytest.mark.parametrize("length", [7, 8, 16, 17, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 4, 200])
def test_evaluation_reads_each_item_once_in_equally_many_batches(length, world_size, batch_size):
    parts = [evaluation_batches(length, batch_size, rank, world_size) for rank in range(world_size)]
    assert sorted(item for part in parts for batch in part for item in batch) == list(range(length))
    assert len({len(part) for part in parts}) == 1
    sizes = [len(batch) for part in parts for batch in part]
    assert min(sizes) >= 1
    assert max(sizes) <= batch_size + (world_size > 1)


def test_fewer_items_than_processes_is_an_error():
    with pytest.raises(UserError, match="at least one item to evaluate for each of 3 processes, got 2"):
        evaluation_batches(2, 4, 0, 3)


def test_draws_of_a_sample_depend_on_all_counters():
    numbers = {
        sample_numbers(seed, epoch, row) for seed in range(3) for epoch in range(3) for row in (0, 1, 2, 1 << 32)
    }
    assert len(numbers) == 3 * 3 * 4
    assert sample_numbers(1, 2, 3) == sample_numbers(1, 2, 3)
    rows = {substitute(0, 0, 0, attempt, 1000) for attempt in range(1, 20)}
    assert len(rows) > 15


def test_seeding_a_transform_leaves_the_process_as_it_was():
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(2).tolist(), np.random.rand(2).tolist()
    torch.manual_seed(3)
    np.random.seed(3)
    with seeded(1):
        first = torch.rand(1).item(), np.random.rand()
    with seeded(1):
        assert (torch.rand(1).item(), np.random.rand()) == first
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist()) == expected


def test_seeding_inside_a_kept_batch_leaves_the_process_as_it_was():
    def draws():
        return torch.rand(2).tolist(), np.random.randn(2).tolist(), random.random()

    def start():
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        np.random.randn()  # leaves half a pair of normal draws behind

    start()
    expected = draws()
    start()
    with preserve_rng_states():
        with seeded(1):
            first = draws()
        with seeded(1):
            assert draws() == first
    assert draws() == expected
    start()
    with pytest.raises(ZeroDivisionError), preserve_rng_states(), seeded(1):
        raise ZeroDivisionError
    assert draws() == expected
    start()
    with seeded(1):  # the failed one left nothing behind
        pass
    assert draws() == expected
