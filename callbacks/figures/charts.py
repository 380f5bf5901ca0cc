"""Line and bar charts drawn with Pillow alone: several frames of the same scales, and one legend for all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw

from .drawing import FAINT, INK, PAPER, load_font

# Everything is drawn this many times as large and then reduced, so that slanted lines get smooth edges.
_OVERSAMPLING = 2
_WIDTH, _HEIGHT = 400, 210  # of a frame, pixels
_LEFT, _RIGHT, _ABOVE, _BELOW = 72, 36, 42, 56  # around it: numbers, title, numbers and the axis' name
_LEGEND = 34
_TEXT_SIZE, _TITLE_SIZE = 13, 15
_LINE, _DOT = 2, 3  # width of a line, radius of its last point
_TICKS = 5  # about so many numbers on an axis
_GRID, _FRAME = (228, 228, 228), (150, 150, 150)
# Colours of the first to the last series, which have an order; those between are mixed of neighbours.
_COLOURS = ((50, 60, 165), (25, 140, 190), (40, 160, 90), (165, 170, 25), (235, 140, 25), (195, 45, 40))

Colour = tuple[int, ...]


@dataclass
class Chart:
    """A frame with its numbers; those that are not finite are left out.

    Attributes:
        title: above it.
        series: values by the name in the legend, which is that of the first chart of a figure.
    """

    title: str
    series: Mapping[str, Sequence[float]]


def draw_line_charts(charts: Sequence[Chart], x: Sequence[int], x_name: str, columns: int = 2) -> Image.Image:
    """Draw values over numbers, with a dot at the last of each line.

    Args:
        charts: from left to right, row by row.
        x: whole numbers, ascending, not negative; the axis begins at 0.
        x_name: of that axis.
        columns: charts in a row.
    """
    figure = _Figure(charts, columns, with_zero=False)
    right = max(x[-1], 1)
    ticks = [tick for tick in _ticks(0, right, least=1) if tick <= right]
    for number, chart in enumerate(charts):
        frame = figure.frame(number, x_name)
        for tick in ticks:
            frame.x_label(tick / right, _written(tick, 1), grid=True)
        for values, colour in zip(chart.series.values(), _palette(len(chart.series)), strict=True):
            places = [
                (step / right, value) if math.isfinite(value) else None for step, value in zip(x, values, strict=True)
            ]
            for start, end in pairwise(places):
                if start is not None and end is not None:
                    frame.line(start, end, colour)
            if places[-1] is not None:
                frame.dot(places[-1], colour)
    return figure.finished()


def draw_bar_charts(charts: Sequence[Chart], groups: Sequence[str], x_name: str, columns: int = 2) -> Image.Image:
    """Draw bars from 0, in groups with a bar of each series.

    Args:
        charts: from left to right, row by row; values are not negative.
        groups: what is written below each.
        x_name: of the axis.
        columns: charts in a row.
    """
    figure = _Figure(charts, columns, with_zero=True)
    for number, chart in enumerate(charts):
        frame = figure.frame(number, x_name)
        room = 1 / len(groups)
        bar = 0.7 * room / len(chart.series)
        for place, group in enumerate(groups):
            frame.x_label((place + 0.5) * room, group, grid=False)
            for index, (values, colour) in enumerate(
                zip(chart.series.values(), _palette(len(chart.series)), strict=True)
            ):
                if math.isfinite(values[place]):
                    start = (place + 0.15) * room + index * bar
                    frame.bar(start, start + bar, values[place], colour)
    return figure.finished()


class _Figure:
    """The canvas, and the vertical scale that all charts have."""

    def __init__(self, charts: Sequence[Chart], columns: int, with_zero: bool) -> None:
        self.charts = charts
        self.columns = min(columns, len(charts))
        values = [value for chart in charts for series in chart.series.values() for value in series]
        finite = [value for value in values if math.isfinite(value)] + [0.0] * with_zero or [0.0]
        self.ticks = _ticks(min(finite), max(finite))
        rows = math.ceil(len(charts) / columns)
        width, height = self.columns * (_LEFT + _WIDTH + _RIGHT), rows * (_ABOVE + _HEIGHT + _BELOW) + _LEGEND
        self.image = Image.new("RGB", (_OVERSAMPLING * width, _OVERSAMPLING * height), PAPER)
        self.canvas = ImageDraw.Draw(self.image)

    def frame(self, number: int, x_name: str) -> "_Frame":
        """The frame of a chart, drawn with its title and its vertical axis."""
        row, column = divmod(number, self.columns)
        left = column * (_LEFT + _WIDTH + _RIGHT) + _LEFT
        top = row * (_ABOVE + _HEIGHT + _BELOW) + _ABOVE
        return _Frame(self.canvas, left, top, self.ticks, self.charts[number].title, x_name)

    def finished(self) -> Image.Image:
        """The figure with its legend, at its size."""
        names = list(self.charts[0].series)
        font = load_font(_OVERSAMPLING * _TEXT_SIZE)
        square, gap = _OVERSAMPLING * _TEXT_SIZE, _OVERSAMPLING * 6
        widths = [square + gap + font.getlength(name) + 3 * gap for name in names]
        x, y = (self.image.width - sum(widths)) / 2, self.image.height - _OVERSAMPLING * _LEGEND
        for name, width, colour in zip(names, widths, _palette(len(names)), strict=True):
            self.canvas.rectangle((x, y, x + square, y + square), fill=colour)
            self.canvas.text((x + square + gap, y + square / 2), name, INK, font, anchor="lm")
            x += width
        return self.image.reduce(_OVERSAMPLING)


class _Frame:
    """Draws in a frame: across from 0 to 1, upwards on the scale of its ticks."""

    def __init__(
        self, canvas: ImageDraw.ImageDraw, left: int, top: int, ticks: Sequence[float], title: str, x_name: str
    ) -> None:
        self.canvas = canvas
        self.left, self.top = left, top
        self.low, self.high = ticks[0], ticks[-1]
        for tick in ticks:
            y = self._at((0, tick))[1]
            self._rule((left, y), (left + _WIDTH, y), _GRID)
            self._text((left - 8, y), _written(tick, ticks[1] - ticks[0]), "rm", FAINT)
        self._rule((left, top), (left, top + _HEIGHT), _FRAME)
        self._rule((left, top + _HEIGHT), (left + _WIDTH, top + _HEIGHT), _FRAME)
        self._text((left + _WIDTH / 2, top - 10), title, "ms", INK, _TITLE_SIZE)
        self._text((left + _WIDTH / 2, top + _HEIGHT + 26), x_name, "ma", FAINT)

    def x_label(self, x: float, text: str, grid: bool) -> None:
        """Write below the horizontal axis."""
        across = self.left + x * _WIDTH
        if grid and x:
            self._rule((across, self.top), (across, self.top + _HEIGHT), _GRID)
        self._text((across, self.top + _HEIGHT + 7), text, "ma", FAINT)

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: Colour) -> None:
        """A straight line."""
        self._rule(self._at(start), self._at(end), colour, _LINE)

    def dot(self, place: tuple[float, float], colour: Colour) -> None:
        """A point that can be seen."""
        x, y = self._at(place)
        self.canvas.ellipse(_scaled(x - _DOT, y - _DOT, x + _DOT, y + _DOT), fill=colour)

    def bar(self, left: float, right: float, height: float, colour: Colour) -> None:
        """From 0 upwards."""
        corners = (*self._at((left, height)), *self._at((right, 0)))
        self.canvas.rectangle(_scaled(*corners), fill=colour)

    def _at(self, place: tuple[float, float]) -> tuple[float, float]:
        """Pixels of a point of the chart."""
        x, y = place
        return self.left + x * _WIDTH, self.top + _HEIGHT * (self.high - y) / (self.high - self.low)

    def _rule(self, start: tuple[float, float], end: tuple[float, float], colour: Colour, width: int = 1) -> None:
        self.canvas.line(_scaled(*start, *end), colour, _OVERSAMPLING * width)

    def _text(self, place: tuple[float, float], text: str, anchor: str, colour: Colour, size: int = _TEXT_SIZE) -> None:
        x, y = _scaled(*place)
        self.canvas.text((x, y), text, colour, load_font(_OVERSAMPLING * size), anchor=anchor)


def _scaled(*numbers: float) -> tuple[float, ...]:
    return tuple(_OVERSAMPLING * number for number in numbers)


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Two or more round numbers in equal steps of at least `least`, from the lowest value or below to the highest."""
    about = (high - low or abs(high) or 1.0) / _TICKS
    magnitude = 10.0 ** math.floor(math.log10(about))
    step = max(least, next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= 0.999 * about))
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _written(tick: float, step: float) -> str:
    """A number with the digits that steps of such a size need."""
    return f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-6))}f}"


def _palette(count: int) -> list[Colour]:
    places = np.linspace(0, len(_COLOURS) - 1, count)
    channels = [np.interp(places, range(len(_COLOURS)), channel) for channel in zip(*_COLOURS, strict=True)]
    return [tuple(round(value) for value in colour) for colour in zip(*channels, strict=True)]
