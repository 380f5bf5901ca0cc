"""Grids of images: nothing is cut off, correct images have a frame, and heat follows the map."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image

from vlightning.callbacks.figures.grid import (
    RIGHT,
    WRONG,
    Panel,
    Row,
    draw_rows,
    missing_glyphs,
    wrapped,
)


def _gray(width=64, height=64):
    return Image.new("RGB", (width, height), (128, 128, 128))


def _rendered(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def _panels(figure):
    return [axes for axes in figure.axes if axes.images]


def _texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize(
    "text",
    [
        "a small red circle above a large blue ring and some more words",
        "one",
        "unbreakable" * 12,
        "short " + "x" * 60 + " short",
        "café 😀 naïve\nsecond line\ttab",
    ],
)
def test_wrapped_lines_have_the_maximum_length_and_contain_the_whole_text(text):
    lines = wrapped(text, 20, 99).split("\n")
    assert all(0 < len(line) <= 20 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_text_beyond_the_limit_becomes_an_ellipsis():
    lines = wrapped("word " * 40, 12, 3).split("\n")
    assert len(lines) == 3
    assert lines[-1].endswith("…")
    assert not lines[0].endswith("…")


def test_a_figure_has_a_text_and_its_panels_for_each_row():
    rows = [
        Row("first", "a note", [Panel(_gray(), f"title {n}") for n in range(3)]),
        Row("second", "", [Panel(_gray())]),
    ]
    figure = draw_rows(rows)
    assert _texts(figure) == ["first", "a note", "second", ""]
    assert [axes.get_title() for axes in _panels(figure)] == ["title 0", "title 1", "title 2", ""]
    first, _, _, last = _panels(figure)
    assert first.get_position().y0 > last.get_position().y1
    assert first.get_position().x0 == pytest.approx(last.get_position().x0)


def test_nothing_is_cut_off():
    """Long texts, a long title, and a framed image are inside the figure and overlap nothing beside them."""
    panels = [Panel(_gray(), "a title that is far too long for an image", right=True) for _ in range(3)]
    figure = draw_rows([Row("many words " * 50, "a note", panels), Row("x" * 80, "", panels[:1])])
    pixels = _rendered(figure)
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert (edge == 255).all()
    renderer = figure.canvas.get_renderer()
    left = min(axes.get_window_extent(renderer).x0 for axes in _panels(figure))
    boxes = [text.get_window_extent(renderer) for axes in figure.axes for text in axes.texts if text.get_text()]
    assert all(box.x1 < left for box in boxes)
    first, note, second = boxes
    assert first.y0 >= note.y1
    assert note.y0 >= second.y1
    titles = [axes.title.get_window_extent(renderer) for axes in _panels(figure)[:3]]
    assert all(one.x1 < other.x0 for one, other in pairwise(titles))


def test_a_correct_image_has_a_thick_green_frame_and_others_a_thin_gray_one():
    right, wrong = _panels(draw_rows([Row("", "", [Panel(_gray(), right=True), Panel(_gray())])]))
    for axes, color in ((right, RIGHT), (wrong, WRONG)):
        assert {to_hex(spine.get_edgecolor()) for spine in axes.spines.values()} == {color}
        assert all(spine.get_visible() for spine in axes.spines.values())
    assert right.spines["top"].get_linewidth() >= 4 * wrong.spines["top"].get_linewidth()


def test_images_keep_their_colors_and_proportions():
    image = Image.new("RGB", (50, 100), (200, 10, 30))
    (axes,) = _panels(draw_rows([Row("", "", [Panel(image)])]))
    assert axes.get_aspect() == 1.0
    assert np.array_equal(axes.images[0].get_array(), np.asarray(image))


@pytest.mark.parametrize("text", ["", "日本語", "عربي", "emoji 😀", "\u200b", "a\nb\tc", "costs $5_^ or $6", "$\\frac"])
def test_letters_missing_in_the_font_are_drawn_without_warnings(text):
    figure = draw_rows([Row(text, text, [Panel(_gray(), text)])])
    with missing_glyphs(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Glyph .* missing")
        warnings.filterwarnings("ignore", "Matplotlib currently does not support")
        assert _rendered(figure).ndim == 3


def test_no_rows_and_rows_without_images_can_be_drawn():
    assert _rendered(draw_rows([])).size
    assert _texts(draw_rows([Row("text")])) == ["text", ""]


def test_heat_follows_the_map_for_any_image_shape():
    strength = torch.zeros(6, 6)
    strength[1, 4] = 7
    (axes,) = _panels(draw_rows([Row("", "", [Panel(_gray(60, 30), heat=strength)])]))
    gray, heat = axes.images
    assert tuple(gray.get_extent()) == tuple(heat.get_extent()) == (-0.5, 59.5, 29.5, -0.5)
    assert np.array_equal(heat.get_array(), strength / 7)  # its maximum is full heat
    assert (heat.get_alpha() > 0).tolist() == (strength > 0).tolist()
    assert heat.get_clim() == (0, 1)


def test_zero_heat_leaves_the_gray_image():
    red = Image.new("RGB", (20, 20), (200, 0, 0))
    (axes,) = _panels(draw_rows([Row("", "", [Panel(red, heat=torch.zeros(4, 4))])]))
    gray, heat = axes.images
    assert np.array_equal(gray.get_array(), np.asarray(red.convert("L")))
    assert not heat.get_alpha().any()
