"""Draws by sample: their distribution, independence, and equality on any number of processes."""

import pytest
import torch

from vlightning.callbacks import draws

CPU = torch.device("cpu")
WORD = 2**32 - 1


@pytest.fixture(autouse=True)
def step():
    draws.begin_step(5)
    yield
    draws.begin_step(None)


def mixed(bits):
    """lowbias32 in Python's integers."""
    bits &= WORD
    bits = (bits ^ bits >> 16) * 0x7FEB352D & WORD
    bits = (bits ^ bits >> 15) * 0x846CA68B & WORD
    return bits ^ bits >> 16


def test_the_bits_are_a_hash_of_key_row_and_column():
    key = draws.draw_number()
    draws.begin_step(5)
    found = draws.draw_bits(3, torch.tensor([0, 1, 70_000]), CPU).tolist()
    for row in range(3):
        start = mixed(mixed(row + (key & WORD)) ^ key >> 32)
        factor = mixed(start + 1) | 1
        assert found[row] == [mixed(factor * column + start) for column in (0, 1, 70_000)]


def test_bits_are_equally_distributed_and_those_of_rows_columns_and_calls_are_unrelated():
    first, second = draws.draw_bits(200, 500, CPU), draws.draw_bits(200, 500, CPU)
    for bit in range(32):
        assert abs((first >> bit & 1).double().mean() - 0.5) < 5 * 0.5 / 100_000**0.5
    values = [draws._uniform(each).double() - 0.5 for each in (first, second)]
    pairs = [(values[0], values[1]), (values[0][1:], values[0][:-1]), (values[0][:, 1:], values[0][:, :-1])]
    for one, other in pairs:
        assert abs((one * other).mean() * 12) < 5 / one.numel() ** 0.5
    assert abs(values[0].var() * 12 - 1) < 0.02
    assert float(values[0].mean(0).abs().max()) < 5 * (12 * 200) ** -0.5
    assert float(values[0].mean(1).abs().max()) < 5 * (12 * 500) ** -0.5


def test_a_uniform_draw_is_never_0_or_1():
    ends = draws._uniform(torch.tensor([0, WORD]))
    assert ends.dtype == torch.float32
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]


def test_normal_draws_have_the_moments_of_a_normal_distribution_in_parts_too(monkeypatch):
    whole = draws.draw_normal(40, 5000, CPU)
    monkeypatch.setattr(draws, "_AT_ONCE", 15_000)
    draws.begin_step(5)
    assert torch.equal(draws.draw_normal(40, 5000, CPU), whole)
    values = whole.double()
    moments = [float((values**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)


def test_processes_draw_their_rows_of_the_global_batch(monkeypatch):
    def all_draws(rows):
        draws.begin_step(5)
        return (
            draws.draw_bits(rows, 7, CPU),
            draws.draw_uniform(rows, 7, CPU),
            draws.draw_normal(rows, 7, CPU),
            draws.chosen_half(rows, CPU),
        )

    whole = all_draws(8)
    assert int(whole[3].sum()) == 4
    monkeypatch.setattr(draws, "world_size", lambda: 4)
    parts = []
    for rank in range(4):
        monkeypatch.setattr(draws, "rank", lambda rank=rank: rank)
        parts.append(all_draws(2))
    for one, part in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one, torch.cat(part))


def test_without_a_step_draws_follow_the_seed_of_torch():
    draws.begin_step(None)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([draws.draw_number(), draws.draw_number()])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]
