"""Rows of images with text beside and above them, and heat maps, drawn with Pillow alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIDE = 128  # pixels that an image may take in each direction
_TEXT_WIDTH = 210
_MARGIN = 16  # around the whole, and between rows
_GAP = 14  # between the images of a row
_FRAME = 6  # room for a frame around an image
_TEXT_SIZE, _TITLE_SIZE = 15, 13
_LINES = 14  # longest text beside a row

INK, FAINT, _RIGHT, _WRONG, PAPER = (20, 20, 20), (110, 110, 110), (0, 150, 60), (190, 190, 190), (255, 255, 255)
# A heat map's colours from none to full: shares of the whole, and red, green and blue at each of them.
_HEAT = (0.0, 0.35, 0.65, 1.0)
_HEAT_RGB = ((60, 180, 250, 255), (0, 20, 100, 240), (110, 120, 30, 60))


@dataclass
class Panel:
    """An image with a line above it.

    Attributes:
        image: RGB, any size.
        title: cut where it is too long.
        right: framed thick and green if true, thin and grey if not.
    """

    image: Image.Image
    title: str = ""
    right: bool = False


@dataclass
class Row:
    """A text and the images to its right.

    Attributes:
        text: wrapped.
        note: a smaller line below it.
        panels: from left to right.
    """

    text: str
    note: str = ""
    panels: list[Panel] = field(default_factory=list)


def draw_rows(rows: Sequence[Row]) -> Image.Image:
    """Draw rows one below the other on white, as wide and high as they need."""
    texts = [wrapped(row.text, load_font(_TEXT_SIZE), _TEXT_WIDTH, _LINES) for row in rows]
    panel, line, small = SIDE + 2 * _FRAME, round(_TEXT_SIZE * 1.35), round(_TITLE_SIZE * 1.5)
    heights = [
        max(small + panel, small + _FRAME + len(text) * line + (small if row.note else 0))
        for row, text in zip(rows, texts, strict=True)
    ]
    columns = max((len(row.panels) for row in rows), default=0)
    width = 2 * _MARGIN + _TEXT_WIDTH + columns * (_GAP + panel)
    figure = Image.new("RGB", (width, _MARGIN + sum(height + _MARGIN for height in heights)), PAPER)
    canvas = ImageDraw.Draw(figure)
    y = _MARGIN
    for row, text, height in zip(rows, texts, heights, strict=True):
        below = y + small + _FRAME
        for part in text:
            canvas.text((_MARGIN, below), part, INK, load_font(_TEXT_SIZE))
            below += line
        canvas.text((_MARGIN, below + 2), row.note, FAINT, load_font(_TITLE_SIZE))
        for column, content in enumerate(row.panels):
            x = _MARGIN + _TEXT_WIDTH + _GAP + column * (_GAP + panel)
            _draw_panel(figure, canvas, content, x, y, small)
        y += height + _MARGIN
    return figure


def _draw_panel(figure: Image.Image, canvas: ImageDraw.ImageDraw, panel: Panel, x: int, y: int, title: int) -> None:
    image = fitted(panel.image)
    left, top = x + _FRAME + (SIDE - image.width) // 2, y + title + _FRAME + (SIDE - image.height) // 2
    figure.paste(image, (left, top))
    room = _FRAME if panel.right else 1
    box = (left - room, top - room, left + image.width + room - 1, top + image.height + room - 1)
    canvas.rectangle(box, outline=_RIGHT if panel.right else _WRONG, width=room)
    font = load_font(_TITLE_SIZE)
    (text,) = wrapped(panel.title, font, SIDE + 2 * _FRAME, 1) or [""]
    centre = x + _FRAME + SIDE / 2
    canvas.text((centre, y), text, _RIGHT if panel.right else INK, font, anchor="ma")


def fitted(image: Image.Image) -> Image.Image:
    """The image at its own proportions, enlarged or reduced until it fits a square of `SIDE` pixels."""
    scale = SIDE / max(image.size)
    width, height = (max(1, round(size * scale)) for size in image.size)
    return image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)


def heat(image: Image.Image, strength: Tensor) -> Image.Image:
    """Lay a map over an image, of which only the greys are left so that no colour is taken for heat.

    Args:
        image: any size.
        strength: [h, w], not negative; it is stretched over the whole image, smoothly, and its maximum is full heat.

    Returns:
        RGB, as large as `fitted` makes the image.
    """
    image = fitted(image)
    small = Image.fromarray(strength.detach().float().cpu().numpy(), mode="F")
    warm = np.asarray(small.resize(image.size, Image.Resampling.BICUBIC)).clip(0)  # bicubic goes below zero
    warm = warm / max(float(warm.max()), 1e-30)
    colour = np.stack([np.interp(warm, _HEAT, channel) for channel in _HEAT_RGB], -1)
    grey = np.asarray(image.convert("L"), dtype=np.float64)[..., None]
    opacity = 0.75 * warm[..., None] ** 0.7
    return Image.fromarray(((1 - opacity) * grey + opacity * colour).round().astype(np.uint8))


def wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, lines: int) -> list[str]:
    """Break a text into lines of at most `width` pixels; what is beyond the last line becomes an ellipsis."""
    found = [""]
    for word in text.split():
        longer = f"{found[-1]} {word}".lstrip()
        if font.getlength(longer) <= width:
            found[-1] = longer
            continue
        found.append("")
        for letter in word:  # a word may be longer than a line, as in scripts without spaces
            if found[-1] and font.getlength(found[-1] + letter) > width:
                found.append("")
            found[-1] += letter
    found = [line for line in found if line]
    if len(found) > lines:
        last = found[lines - 1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        found = [*found[: lines - 1], last + "…"]
    return found


def load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font of all figures, at a size in pixels."""
    return ImageFont.load_default(size)
