"""Rows of images: nothing cut off, right ones framed, heat where the map is high."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from vlightning.callbacks.figures.drawing import SIDE, Panel, Row, draw_rows, fitted, heat, wrapped

FONT = ImageFont.load_default(15)
GREEN = (0, 150, 60)


def _grey(width=64, height=64):
    return Image.new("RGB", (width, height), (128, 128, 128))


def _is(figure, colour):
    return (np.asarray(figure) == colour).all(-1)


@pytest.mark.parametrize(
    "text",
    [
        "a small red circle above a large blue ring and some more words",
        "one",
        "unbreakable" * 12,
        "short " + "x" * 60 + " short",
        "一只红色的小圆圈在一个大蓝环的上方" * 3,
        "مثلث صغير فوق دائرة كبيرة زرقاء وأشياء أخرى كثيرة",
        "café 😀 naïve\nsecond line\ttab",
    ],
)
def test_lines_are_no_wider_than_asked_and_hold_the_whole_text(text):
    lines = wrapped(text, FONT, 150, 99)
    assert all(0 < FONT.getlength(line) <= 150 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_words_stay_whole_where_they_fit_and_spaces_between_them():
    assert wrapped("aa bb cc", FONT, FONT.getlength("aa bb"), 9) == ["aa bb", "cc"]
    assert wrapped("", FONT, 100, 9) == []


def test_what_does_not_fit_becomes_an_ellipsis_within_the_width():
    lines = wrapped("word " * 40, FONT, 100, 3)
    assert len(lines) == 3
    assert lines[-1].endswith("…")
    assert FONT.getlength(lines[-1]) <= 100
    assert not lines[0].endswith("…")


def test_nothing_reaches_the_margins_of_a_figure():
    """Long texts, a long title and an image in a frame: all of it inside, on white."""
    panels = [Panel(_grey(), "a title that is far too long for an image", right=True) for _ in range(3)]
    figure = np.asarray(draw_rows([Row("many words " * 30, "a note", panels), Row("x" * 80, "", panels[:1])]))
    for edge in (figure[:8], figure[-8:], figure[:, :8], figure[:, -8:]):
        assert (edge == 255).all()


def test_a_row_grows_with_its_text_and_the_next_starts_below():
    one = draw_rows([Row("short", "note", [Panel(_grey())])])
    many = draw_rows([Row("word " * 60, "note", [Panel(_grey())])])
    assert many.height > one.height
    assert many.width == one.width
    second = Row("", "", [Panel(_grey(), right=True)])
    figure = draw_rows([Row("word " * 60, "note", [Panel(_grey())]), second])
    green_rows = np.flatnonzero(_is(figure, GREEN).any(1))
    assert green_rows.min() > many.height - 16


def test_a_right_image_has_a_thick_green_frame_and_a_wrong_one_a_thin_grey_one():
    right = draw_rows([Row("", "", [Panel(_grey(), right=True)])])
    wrong = draw_rows([Row("", "", [Panel(_grey())])])
    assert _is(right, GREEN).sum() == (SIDE + 12) ** 2 - SIDE**2
    assert not _is(wrong, GREEN).any()
    assert _is(wrong, (190, 190, 190)).sum() == (SIDE + 2) ** 2 - SIDE**2
    for figure in (right, wrong):  # the frame covers nothing of the image
        assert _is(figure, (128, 128, 128)).sum() == SIDE**2


def test_a_frame_follows_the_shape_of_its_image():
    figure = draw_rows([Row("", "", [Panel(_grey(50, 100), right=True)])])
    assert _is(figure, GREEN).sum() == (SIDE // 2 + 12) * (SIDE + 12) - SIDE // 2 * SIDE


def test_text_title_and_note_are_drawn():
    empty = np.asarray(draw_rows([Row("", "", [Panel(_grey())])]))
    for row in (
        Row("text", "", [Panel(_grey())]),
        Row("", "note", [Panel(_grey())]),
        Row("", "", [Panel(_grey(), "title")]),
    ):
        assert (np.asarray(draw_rows([row])) != empty).any()


@pytest.mark.parametrize("text", ["", "日本語", "عربي", "emoji 😀", "\u200b", "a\nb\tc"])
def test_any_letters_can_be_drawn(text):
    figure = draw_rows([Row(text, text, [Panel(_grey(), text)])])
    assert figure.mode == "RGB"


def test_no_rows_and_rows_without_images_can_be_drawn():
    assert draw_rows([]).width > 0
    assert draw_rows([Row("text")]).height > 16


@pytest.mark.parametrize(("size", "expected"), [((48, 48), (128, 128)), ((400, 200), (128, 64)), ((1, 500), (1, 128))])
def test_images_are_scaled_to_fit_at_their_proportions(size, expected):
    assert fitted(_grey(*size)).size == expected
    assert heat(_grey(*size), torch.ones(3, 3)).size == expected


def test_heat_is_where_the_map_is_high_whatever_the_shape_of_the_image():
    strength = torch.zeros(6, 6)
    strength[1, 4] = 1
    drawn = np.asarray(heat(_grey(60, 30), strength)).astype(int)
    change = np.abs(drawn - 128).sum(-1)
    row, column = np.unravel_index(change.argmax(), change.shape)
    assert abs(row - 64 * 1.5 / 6) < 4
    assert abs(column - 128 * 4.5 / 6) < 4
    assert not change[40:].any()
    assert not change[:, :50].any()


def test_full_heat_is_the_maps_maximum_and_no_heat_leaves_the_greys_of_the_image():
    red = Image.new("RGB", (20, 20), (200, 0, 0))
    strength = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    assert np.abs(np.asarray(heat(red, strength)).astype(int) - np.asarray(heat(red, 1e-6 * strength))).max() <= 1
    cold = np.asarray(heat(red, torch.zeros(4, 4)))
    assert (cold == np.asarray(red.convert("L"))[0, 0]).all()
    hot = np.asarray(heat(red, torch.ones(4, 4)))[64, 64].astype(int)
    assert (np.abs(hot - np.array([255, 240, 60])) < 70).all()  # yellow, the end of the scale
