import os
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from support.methods.tiny_modules import Student, loader
from support.runs.distributed import WorkerError, run_ddp_fit, run_distributed
from vlightning.callbacks import all_reduce_sum, gather, gather_uneven, rank, world_size


def test_a_single_process_gets_its_own_tensor():
    rows = torch.randn(3, 2, requires_grad=True)
    assert gather(rows, gradient=True) is rows
    assert not gather(rows).requires_grad
    assert torch.equal(gather_uneven(rows), rows)
    assert torch.equal(all_reduce_sum(rows), rows)
    assert (world_size(), rank()) == (1, 0)
    for function in (gather, gather_uneven):
        with pytest.raises(ValueError, match="without dimensions"):
            function(torch.tensor(1.0))


def gathered():
    own = torch.full((2, 3), float(rank()))
    results = [gather(own), gather(own.to(torch.bfloat16)), gather(own.T).T, gather(own[:, 0] > 0), gather(own.long())]
    total = all_reduce_sum(own)
    assert torch.all(own == rank())  # untouched
    return results, total, world_size()


def test_rows_are_rank_major_for_every_type():
    for (rows, low, transposed, truth, whole), total, size in run_distributed(gathered):
        assert size == 2
        expected = torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 3)
        assert torch.equal(rows, expected)
        assert torch.equal(low, expected.to(torch.bfloat16))
        assert torch.equal(transposed, torch.tensor([0.0] * 3 + [1.0] * 3).expand(2, 6))
        assert truth.tolist() == [False, False, True, True]
        assert torch.equal(whole, expected.long())
        assert torch.all(total == 1.0)


def gathered_unevenly(counts):
    number = torch.arange(counts[rank()])
    pairs = torch.stack([number, number + 100 * rank()], dim=1)
    return gather_uneven(pairs), gather_uneven(pairs[:, 0] > 0)


@pytest.mark.parametrize("counts", [[3, 1, 0], [0, 0, 2], [0, 0, 0], [2, 2, 2]])
def test_ranks_may_have_different_numbers_of_rows(counts):
    expected = [[i, i + 100 * r] for r, count in enumerate(counts) for i in range(count)]
    for rows, flags in run_distributed(gathered_unevenly, counts, processes=3):
        assert rows.shape == (len(expected), 2)
        assert rows.tolist() == expected
        assert flags.tolist() == [i > 0 for i, _ in expected]


class TwoTowers(nn.Module):
    """A contrastive loss of each rank's queries with the keys of all ranks, and a term that uses the keys twice."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(5, 4), nn.Linear(6, 4)

    def forward(self, x, y):
        queries, keys = F.normalize(self.query(x), dim=1), F.normalize(self.key(y), dim=1)
        all_queries, all_keys = gather(queries, gradient=True), gather(keys, gradient=True)
        own = torch.arange(len(x)) + rank() * len(x)
        return F.cross_entropy(queries @ all_keys.T / 0.1, own) + F.cross_entropy(keys @ all_queries.T / 0.2, own)


def towers():
    torch.manual_seed(0)
    model = TwoTowers().double()
    return model, torch.randn(6, 5).double(), torch.randn(6, 6).double()


def shared_step():
    model, x, y = towers()
    rows = slice(rank() * 3, rank() * 3 + 3)
    wrapped = DistributedDataParallel(model)  # must live until after the backward pass, which it averages
    loss = wrapped(x[rows], y[rows])
    loss.backward()
    return loss.detach(), [weight.grad for weight in model.parameters()]


def test_two_ranks_equal_one_process_with_both_batches_in_loss_and_gradients():
    model, x, y = towers()
    loss = model(x, y)
    loss.backward()
    ranks = run_distributed(shared_step)
    assert abs((ranks[0][0] + ranks[1][0]) / 2 - loss) < 1e-10
    for _, gradients in ranks:
        for found, weight in zip(gradients, model.parameters(), strict=True):
            assert weight.grad.abs().max() > 1e-3
            assert (found - weight.grad).abs().max() < 1e-10


# The harness itself.


def fail_on_one():
    if rank() == 1:
        raise ValueError("only on rank 1")
    torch.distributed.barrier()


def die_on_one():
    if rank() == 1:
        os._exit(3)
    torch.distributed.barrier()


def sleep():
    time.sleep(60)


def surroundings(given):
    return given, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["VLIGHTNING_TEST"], os.getcwd()


def test_tracebacks_of_the_ranks_are_reported():
    with pytest.raises(WorkerError, match=r"rank 1 ---\n(.*\n)*.*in fail_on_one(.*\n)*ValueError: only on rank 1"):
        run_distributed(fail_on_one)


def test_a_rank_that_dies_is_noticed_at_once():
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 ---\nThe process died"):
        run_distributed(die_on_one)
    assert time.monotonic() - start < 20


def test_ranks_that_hang_are_killed():
    with pytest.raises(TimeoutError, match=r"Ranks \[0, 1\]"):
        run_distributed(sleep, timeout=2.0)


def test_ranks_run_where_the_caller_runs_with_one_thread_each(monkeypatch, tmp_path):
    monkeypatch.setenv("VLIGHTNING_TEST", "here")
    monkeypatch.chdir(tmp_path)
    for result in run_distributed(surroundings, given={"x": torch.ones(1)}, processes=1):
        assert result == ({"x": torch.ones(1)}, 1, "1", "here", str(tmp_path))


def make():
    torch.manual_seed(rank())  # DDP starts from rank 0's weights
    return Student(), loader(4)


def test_lightning_fits_over_the_ranks():
    first, second = run_ddp_fit(make, {"max_epochs": 3})
    assert first["global_step"] == second["global_step"] == 6
    assert torch.equal(first["state_dict"]["student.weight"], second["state_dict"]["student.weight"])
