"""Charts: values where their axes say, round numbers on them, and everything inside the image."""

import math

import numpy as np
import pytest

from vlightning.callbacks.figures.charts import (
    _ABOVE,
    _BELOW,
    _HEIGHT,
    _LEFT,
    _RIGHT,
    _WIDTH,
    Chart,
    _palette,
    _ticks,
    _written,
)
from vlightning.callbacks.figures.charts import draw_bar_charts as bars
from vlightning.callbacks.figures.charts import draw_line_charts as lines


def _is(figure, colour):
    """Where an image has a colour, [h, w], without its legend."""
    pixels = np.asarray(figure)[: -_BELOW + 10].astype(int)
    return (np.abs(pixels - np.array(colour)).sum(-1) < 12) & (np.arange(len(pixels)) < len(pixels) - 20)[:, None]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.41, 1.13, [0.4, 0.6, 0.8, 1.0, 1.2]),
        (-3, 40, [-10, 0, 10, 20, 30, 40]),
        (0, 804_000, [0, 200_000, 400_000, 600_000, 800_000, 1_000_000]),
        (0.7, 0.7, [0.6, 0.8]),
        (0, 0, [0, 0.2]),
        (1e-7, 3e-7, [1e-7, 1.5e-7, 2e-7, 2.5e-7, 3e-7]),
    ],
)
def test_ticks_are_round_and_span_the_values(low, high, expected):
    assert _ticks(low, high) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_steps_are_whole_where_they_count_something():
    assert _ticks(0, 3, least=1) == [0, 1, 2, 3]
    assert _ticks(0, 1, least=1) == [0, 1]


def test_numbers_have_the_digits_that_tell_them_apart():
    assert [_written(tick, 0.2) for tick in (0.2, 0.2 * 3)] == ["0.2", "0.6"]
    assert [_written(tick, 0.05) for tick in (0.7, 0.75)] == ["0.70", "0.75"]
    assert _written(800_000, 200_000) == "800,000"
    assert _written(-10, 10) == "-10"


def test_a_line_goes_through_its_values():
    (colour,) = _palette(1)
    figure = lines([Chart("t", {"a": [0.0, 0.0, 1.0]})], [0, 5, 10], "step", columns=1)
    assert figure.width == _LEFT + _WIDTH + _RIGHT
    rows, columns = np.nonzero(_is(figure, colour))
    assert columns.min() == pytest.approx(_LEFT, abs=2)
    assert columns.max() == pytest.approx(_LEFT + _WIDTH, abs=4)
    for x, y in ((0.25, 0.0), (0.75, 0.5), (0.9, 0.8)):
        near = np.abs(columns - (_LEFT + x * _WIDTH)) < 2
        assert rows[near].mean() == pytest.approx(_ABOVE + (1 - y) * _HEIGHT, abs=2)


def test_a_bar_is_as_high_as_its_value_and_all_charts_have_one_scale():
    values = [[40.0, 10.0], [20.0, 30.0]]
    figure = bars([Chart("one", {"a": values[0], "b": values[1]}), Chart("two", {"a": [5, 5], "b": [5, 5]})], "xy", "x")
    for colour, series in zip(_palette(2), values, strict=True):
        found = _is(figure, colour)
        half = _LEFT + _WIDTH // 2
        for part, value in zip((found[:, :half], found[:, half : _LEFT + _WIDTH]), series, strict=True):
            rows = np.flatnonzero(part.any(1))
            assert rows.max() - rows.min() == pytest.approx(value / 40 * _HEIGHT, abs=2)
        rows = np.flatnonzero(found[:, _LEFT + _WIDTH + _RIGHT :].any(1))
        assert rows.max() - rows.min() == pytest.approx(5 / 40 * _HEIGHT, abs=2)


def test_each_chart_has_its_frame_and_nothing_reaches_the_edges():
    charts = [Chart(f"chart {n}", {f"series {k}": [1e5 * k, 2e5, 9e5] for k in range(6)}) for n in range(3)]
    for figure in (lines(charts, [0, 1, 800_000], "step"), bars(charts, ["first", "second", "third"], "group")):
        assert figure.size == (2 * (_LEFT + _WIDTH + _RIGHT), 2 * (_ABOVE + _HEIGHT + _BELOW) + 34)
        pixels = np.asarray(figure)
        for edge in (pixels[:4], pixels[-4:], pixels[:, :4], pixels[:, -4:]):
            assert (edge == 255).all()


def test_what_is_not_finite_is_left_out_and_a_single_value_is_seen():
    (colour,) = _palette(1)
    figure = lines([Chart("", {"a": [0.0, math.nan, 1.0, math.inf]})], [0, 1, 2, 3], "", columns=1)
    assert not _is(figure, colour).any()
    for values in ([math.nan], [math.inf]):
        lines([Chart("", {"a": values})], [0], "")
        bars([Chart("", {"a": values})], ["x"], "")
    assert 10 < _is(lines([Chart("", {"a": [0.7]})], [0], ""), colour).sum() < 60
