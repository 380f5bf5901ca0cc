import math

import pytest

from vlightning.lightning_modules.albef.schedule import Staircase
from vlightning.lightning_modules.optim.schedules import WarmupCosine

PRETRAIN = {"epochs": 30, "peak": 1e-4, "floor": 1e-5, "warmup_steps": 2000, "warmup_start": 1e-5}


def test_official_schedule_equals_the_authors_loop():
    """The loop as specified: the rate changes at the end of iterations in epoch 0, then at the start of each epoch."""
    for steps, warmup, epochs in ((2300, 2000, 4), (250, 100, 3), (120, 2000, 2), (50, 0, 3)):
        kwargs = PRETRAIN | {"warmup_steps": warmup, "epochs": epochs}
        rate, expected = (1e-5 if warmup else 1e-4), []
        for epoch in range(epochs):
            if epoch > 0:
                rate = 1e-5 + 0.5 * (1e-4 - 1e-5) * (1 + math.cos(math.pi * epoch / epochs))
            for i in range(steps):
                expected.append(rate)
                if epoch == 0 and i % 100 == 0 and i <= warmup and warmup:
                    t, w = i // 100, warmup // 100
                    rate = 1e-5 + t * (1e-4 - 1e-5) / w if t < w else 1e-4
        got = [Staircase(**kwargs).rate(step, steps * epochs) for step in range(steps * epochs)]
        assert got == pytest.approx(expected, rel=1e-12)


def test_official_schedule_has_the_printed_values():
    def rate(step):
        return Staircase(**PRETRAIN).rate(step, 10_000 * PRETRAIN["epochs"])

    assert [rate(s) for s in (0, 100, 101, 1901, 2001)] == pytest.approx([1e-5, 1e-5, 1.45e-5, 9.55e-5, 1e-4])
    assert [rate(10_000 * e) for e in (1, 2, 3, 15, 29)] == pytest.approx(
        [9.9753e-5, 9.9017e-5, 9.7798e-5, 5.5e-5, 1.0247e-5], rel=1e-4
    )


def test_cosine_warms_up_linearly_and_ends_at_the_floor():
    schedule = WarmupCosine(peak=1.0, warmup_steps=10, floor=0.1, warmup_start=0.2)
    assert [schedule.rate(step, 110) for step in (0, 5, 10, 60, 110)] == pytest.approx([0.2, 0.6, 1.0, 0.55, 0.1])
