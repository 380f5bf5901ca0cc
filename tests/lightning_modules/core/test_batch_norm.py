"""Statistics of BatchNorm when a batch comes in slices: one update a batch, to the bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vlightning.lightning_modules.core.memory import in_slices, one_update


def statistics(norm):
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("earlier", [0, 6])
def test_statistics_move_once_towards_the_mean_of_the_passes(dtype, momentum, earlier):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, momentum=momentum, dtype=dtype)
    unused, frozen = nn.BatchNorm1d(5, dtype=dtype), nn.BatchNorm1d(5, dtype=dtype).eval()
    for _ in range(earlier):
        norm(torch.randn(4, 5, dtype=dtype))
    slices = torch.randn(3, 4, 5, dtype=dtype)
    old_mean, old_var, count = (part.clone() for part in statistics(norm))
    mean, var = old_mean.clone(), old_var.clone()
    for number, rows in enumerate(slices, 1):
        F.batch_norm(rows, mean, var, training=True, momentum=1 / number)
    share = 1 / (earlier + 1) if momentum is None else momentum
    expected = torch.lerp(old_mean, mean, share), torch.lerp(old_var, var, share), count + 1

    before = [id(part) for part in statistics(norm)]
    with one_update(nn.ModuleList([norm, unused, frozen])):
        for rows in slices:
            norm(rows)
            frozen(rows)
    assert all(map(torch.equal, statistics(norm), expected))
    assert [id(part) for part in statistics(norm)] == before  # DDP holds on to them
    assert norm.momentum == momentum
    for other in (unused, frozen):
        assert [part.sum().item() for part in statistics(other)] == [0, 5, 0]


def test_a_failed_pass_restores_the_layer():
    norm = nn.BatchNorm1d(5)
    count = norm.num_batches_tracked
    with pytest.raises(ValueError, match="more than 1 value per channel"), one_update(norm):
        norm(torch.randn(1, 5))
    assert norm.num_batches_tracked is count
    assert norm.momentum == 0.1


def test_no_slice_is_a_single_row_that_cannot_be_normalized():
    torch.manual_seed(0)
    norm, rows = nn.BatchNorm1d(5), torch.randn(7, 5)
    (found,) = in_slices(lambda part: (norm(part),), 3, rows)  # 3 + 2 + 2, not 3 + 3 + 1
    expected = [nn.BatchNorm1d(5)(part) for part in (rows[:3], rows[3:5], rows[5:])]
    torch.testing.assert_close(found, torch.cat(expected))
