"""Pairs of plain images and captions that say which color they have, and a small model that embeds them."""

import csv
import random
from pathlib import Path

from PIL import Image

from support.methods.published import write_published


def write_colors(folder: Path, rows: int = 40, held_out: int = 8) -> Path:
    """Write `model`, `pairs.csv` and `held_out.csv` with their images, and return the folder."""
    write_published(folder / "model")
    (folder / "images").mkdir()
    draw = random.Random(0)
    pairs = []
    for number in range(rows):
        color = tuple(draw.choice((0, 120, 255)) for _ in range(3))
        image = Image.new("RGB", (40, 36), color)
        image.paste((number, 255 - number, 90), (number % 30, 4, number % 30 + 9, 20))
        image.save(folder / f"images/{number}.png")
        pairs.append((f"images/{number}.png", " ".join(("dark", "half", "full")[part // 100] for part in color)))
    for name, part in (("pairs", pairs[: rows - held_out]), ("held_out", pairs[rows - held_out :])):
        write_table(folder / f"{name}.csv", part)
    return folder


def write_table(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write a CSV of images and captions."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])


def read_table(path: Path) -> list[tuple[str, str]]:
    """Return the rows of a CSV of images and captions."""
    with path.open(newline="") as file:
        return [(row["image"], row["caption"]) for row in csv.DictReader(file)]
