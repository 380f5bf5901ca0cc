"""Rows of images with a text beside each row, a title above each image, and heat maps over images."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from warnings import catch_warnings, filterwarnings

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke
from PIL import Image
from torch import Tensor

RIGHT = "#00963c"
WRONG = "#bebebe"
CHOSEN = "#ffffff"
"""Colors of the frame of a correct image, of other images, and of a chosen box."""
_SIDE, _TEXT_WIDTH, _LINE = 1.6, 2.4, 0.17  # inches: an image, the text beside a row, a line of that text
_SHEET_COLUMNS, _SHEET_LINE = 34, 0.11  # characters in a line below an image of a sheet, inches of the line
_TEXT_COLUMNS, _TEXT_LINES, _TITLE_COLUMNS = 32, 14, 24  # characters in a line, lines, characters of a title


@dataclass
class Panel:
    """An image with a line above it.

    Attributes:
        image: Image of any size.
        title: Shortened if it is too long.
        right: Whether the frame is thick and green instead of thin and gray.
        heat: Nonnegative map [h, w], stretched over the gray image; its maximum is full heat.
        boxes: Boxes (x, y, width, height) in pixels with their colors; a later box is drawn inside of an earlier one.
    """

    image: Image.Image
    title: str = ""
    right: bool = False
    heat: Tensor | None = None
    boxes: Sequence[tuple[Tensor, str]] = ()


@dataclass
class Row:
    """A text and the images to its right.

    Attributes:
        text: Wrapped, and shortened if it is too long.
        note: A smaller line below the text.
        panels: From left to right.
    """

    text: str
    note: str = ""
    panels: list[Panel] = field(default_factory=list)


def draw_rows(rows: Sequence[Row]) -> Figure:
    """Draw rows one below the other; the first axes of a row hold its text, each other one an image."""
    texts = [wrapped(row.text, _TEXT_COLUMNS, _TEXT_LINES) for row in rows]
    columns = max((len(row.panels) for row in rows), default=0)
    heights = [max(_SIDE, _LINE * (text.count("\n") + 3)) + 0.35 for text in texts] or [_SIDE]
    figure = Figure(figsize=(_TEXT_WIDTH + columns * (_SIDE + 0.15) + 0.2, sum(heights)))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.3 / sum(heights), wspace=0.1, hspace=0.22)
    axes = figure.subplots(
        len(heights), 1 + columns, squeeze=False, width_ratios=[_TEXT_WIDTH] + [_SIDE] * columns, height_ratios=heights
    )
    for cell in axes.flat:
        cell.set_axis_off()
    for row, text, (beside, *cells) in zip(rows, texts, axes, strict=False):
        # Text of the data is plain text, also between dollar signs.
        style: dict[str, Any] = {
            "xycoords": "axes fraction",
            "va": "top",
            "annotation_clip": False,
            "parse_math": False,
        }
        below = -72 * _LINE * (text.count("\n") + 1.3)  # points
        beside.annotate(text, (0, 1), fontsize=9, **style)
        beside.annotate(row.note, (0, 1), (0, below), textcoords="offset points", fontsize=8, color="0.4", **style)
        for panel, cell in zip(row.panels, cells, strict=False):
            _draw_panel(panel, cell)
    return figure


def draw_sheet(samples: Sequence[tuple[Image.Image, str]], columns: int = 8) -> Figure:
    """Draw images in rows of equal length, each with its text below, of which no line is left out.

    Args:
        samples: images of any size with their texts.
        columns: images of a row.
    """
    texts = [wrapped(text, _SHEET_COLUMNS, len(text) + 1) for _, text in samples]
    heights = [
        _SIDE + _SHEET_LINE * (2 + max(text.count("\n") + 1 for text in texts[start : start + columns]))
        for start in range(0, len(texts), columns)
    ] or [_SIDE]
    figure = Figure(figsize=(columns * (_SIDE + 0.1), sum(heights)))
    figure.subplots_adjust(left=0.005, right=0.995, bottom=0.005, top=0.995, wspace=0.06, hspace=0.0)
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for cell in axes.flat:
        cell.set_axis_off()
    for (image, _), text, cell in zip(samples, texts, axes.flat, strict=False):
        cell.set_anchor("N")
        cell.imshow(np.asarray(image.convert("RGB")))
        below = {"xytext": (0, -3), "textcoords": "offset points", "va": "top", "annotation_clip": False}
        cell.annotate(text, (0, 0), xycoords="axes fraction", fontsize=6.5, parse_math=False, **below)
    return figure


def _draw_panel(panel: Panel, axes: Axes) -> None:
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[], anchor="N")
    for spine in axes.spines.values():
        spine.set(color=RIGHT if panel.right else WRONG, linewidth=4 if panel.right else 0.8)
    title = panel.title if len(panel.title) <= _TITLE_COLUMNS else panel.title[: _TITLE_COLUMNS - 1] + "…"
    axes.set_title(title, fontsize=8, pad=4, color=RIGHT if panel.right else "black", parse_math=False)
    image = panel.image.convert("RGB")
    for number, (box, color) in enumerate(panel.boxes):
        left, top, wide, high = box.tolist()
        # From the corner of a pixel, whose center `imshow` counts; a dark edge separates the line from any image.
        frame = Rectangle((left - 0.5, top - 0.5), wide, high, fill=False, zorder=3 + number)
        frame.set(edgecolor=color, linewidth=5.0 if number == 0 else 1.5)
        frame.set_path_effects([Stroke(linewidth=frame.get_linewidth() + 1, foreground="black"), Normal()])
        axes.add_patch(frame)
    if panel.heat is None:
        axes.imshow(np.asarray(image))
        return
    # Over grays, so that no color of the image is taken for heat.
    axes.imshow(np.asarray(image.convert("L")), cmap="gray", vmin=0, vmax=255)
    heat = panel.heat.detach().float().cpu().numpy()
    heat = heat / max(float(heat.max()), 1e-30)
    extent = (-0.5, image.width - 0.5, image.height - 0.5, -0.5)
    opacity = 0.75 * heat**0.7
    axes.imshow(heat, cmap="plasma", vmin=0, vmax=1, alpha=opacity, extent=extent, interpolation="bilinear")


def wrapped(text: str, columns: int, lines: int) -> str:
    """Break a text into lines; an ellipsis stands for what is beyond the last line."""
    return "\n".join(textwrap.wrap(text, columns, max_lines=lines, placeholder="…"))


@contextmanager
def missing_glyphs() -> Iterator[None]:
    """Draw letters that the font does not have as boxes, without a warning for each."""
    with catch_warnings():
        filterwarnings("ignore", "Glyph .* missing from font")
        filterwarnings("ignore", "Matplotlib currently does not support .* natively")
        yield
