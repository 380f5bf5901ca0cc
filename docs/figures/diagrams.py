"""Draw `docs/images/diagram_*.svg`, the idea of each method in boxes and arrows: `python docs/figures/diagrams.py`."""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

DOCS = Path(__file__).resolve().parent.parent
COLORS = {  # of Okabe and Ito, light enough for black text
    "data": "#f2f2f2",
    "trained": "#9fd0f0",
    "frozen": "#d9d9d9",
    "average": "#cdeac0",
    "stored": "#fff0b3",
    "loss": "#f6c1a0",
}
KINDS = {
    "data": "data",
    "trained": "trained",
    "frozen": "frozen",
    "average": "moving average",
    "stored": "stored",
    "loss": "loss",
}
WIDTH, HEIGHT = 1.7, 0.62  # of a box, in units of a column and a row


@dataclass(frozen=True)
class Box:
    """One box: its text, what it is (a key of `COLORS`), and its center in columns and rows."""

    text: str
    kind: str
    column: float
    row: float


@dataclass(frozen=True)
class Diagram:
    """Boxes by name, and arrows: from, to, words beside the arrow, and whether it is dashed (no gradient)."""

    boxes: dict[str, Box]
    arrows: tuple[tuple[str, str, str, bool], ...]


DIAGRAMS = {
    "albef": Diagram(
        {
            "image": Box("image", "data", 0, 0.5),
            "text": Box("caption", "data", 0, 3.5),
            "vit": Box("ViT", "trained", 2.2, 0.5),
            "bert": Box("BERT,\nlower half", "trained", 2.2, 3.5),
            "itc": Box("contrast", "loss", 4.6, 2),
            "fusion": Box("BERT, upper half\n(cross-attention)", "trained", 7, 2),
            "itm": Box("do they match?", "loss", 9.4, 1.4),
            "mlm": Box("masked words", "loss", 9.4, 2.6),
            "teacher": Box("the same model,\nas teacher", "average", 2.2, 4.8),
            "queue": Box("queues of the\nteacher's features", "stored", 4.6, 4.8),
        },
        (
            ("image", "vit", "", False),
            ("text", "bert", "", False),
            ("vit", "itc", "", False),
            ("bert", "itc", "", False),
            ("vit", "fusion", "patches", False),
            ("bert", "fusion", "words", False),
            ("fusion", "itm", "", False),
            ("fusion", "mlm", "", False),
            ("itc", "fusion", "hard\nnegatives", True),
            ("teacher", "queue", "", True),
            ("queue", "itc", "negatives and\nsoft targets", True),
            ("teacher", "mlm", "soft targets", True),
        ),
    ),
    "clip": Diagram(
        {
            "image": Box("image", "data", 0, 1),
            "text": Box("caption", "data", 0, 3),
            "vision": Box("image tower\n+ adapters", "trained", 4.4, 1),
            "words": Box("text tower\n+ adapters", "trained", 4.4, 3),
            "weights": Box("published\nweights", "frozen", 2.2, 2),
            "loss": Box("contrast:\nsoftmax or sigmoid", "loss", 6.8, 2),
            "gain": Box("recall on your pairs:\nwhat it gained", "data", 9.4, 1.4),
            "guard": Box("other images:\nwhat it forgot", "data", 9.4, 2.6),
        },
        (
            ("image", "vision", "", False),
            ("text", "words", "", False),
            ("weights", "vision", "start", True),
            ("weights", "words", "start", True),
            ("vision", "loss", "", False),
            ("words", "loss", "", False),
            ("loss", "gain", "", True),
            ("loss", "guard", "", True),
        ),
    ),
    "cocord": Diagram(
        {
            "one": Box("view 1", "data", 0, 2),
            "two": Box("view 2", "data", 0, 1),
            "three": Box("view 3", "data", 0, 3),
            "student": Box("student", "trained", 2.4, 2),
            "teacher": Box("teacher", "frozen", 2.4, 1),
            "slow": Box("slow student", "average", 2.4, 3),
            "queue": Box("dictionary of\nearlier keys", "stored", 4.9, 0),
            "predictor": Box("predictor", "trained", 4.9, 2.5),
            "contrast": Box("contrast", "loss", 7.4, 1),
            "consistent": Box("consistency", "loss", 7.4, 3),
            "labels": Box("cross entropy\nwith the labels", "loss", 7.4, 2),
        },
        (
            ("one", "student", "", False),
            ("two", "teacher", "", False),
            ("three", "slow", "", False),
            ("student", "contrast", "query", False),
            ("teacher", "contrast", "key", True),
            ("teacher", "queue", "", True),
            ("queue", "contrast", "negatives", True),
            ("student", "labels", "", False),
            ("student", "predictor", "query", False),
            ("predictor", "consistent", "", False),
            ("slow", "consistent", "its key", True),
        ),
    ),
    "mmlg": Diagram(
        {
            "teacher": Box("CLIP", "frozen", 0, 1),
            "pairs": Box("pairs", "data", 0, 3),
            "auxiliary": Box("auxiliary CLIP,\n12 layers a tower", "trained", 2.6, 2),
            "layer": Box("layer = a · shared block\n+ b · tower's block", "data", 2.6, 3.3),
            "loss": Box("contrast and\ndistillation", "loss", 2.6, 0.7),
            "learngene": Box("learngene: 6 blocks,\n24 coefficients", "stored", 5.4, 2),
            "six": Box("CLIP, 6 layers", "trained", 8.2, 1),
            "eight": Box("CLIP, 8 layers", "trained", 8.2, 2),
            "twelve": Box("CLIP, 12 layers", "trained", 8.2, 3),
        },
        (
            ("pairs", "auxiliary", "", False),
            ("teacher", "loss", "", True),
            ("auxiliary", "loss", "", False),
            ("layer", "auxiliary", "", False),
            ("auxiliary", "learngene", "write", True),
            ("learngene", "six", "expand", True),
            ("learngene", "eight", "expand", True),
            ("learngene", "twelve", "expand", True),
        ),
    ),
    "mobileclip": Diagram(
        {
            "image": Box("image", "data", 0, 1),
            "text": Box("caption", "data", 0, 3),
            "crops": Box("augmentations", "data", 2.2, 1),
            "captioner": Box("captioner", "frozen", 2.2, 2),
            "ensemble": Box("ensemble of\nlarge CLIPs", "frozen", 4.5, 2),
            "shards": Box("reinforced shards:\nimages, texts,\nembeddings", "stored", 6.9, 2),
            "vision": Box("small image\ntower", "trained", 9.3, 1),
            "words": Box("small text\ntower", "trained", 9.3, 3),
            "loss": Box("contrast and\ndistillation", "loss", 11.6, 2),
        },
        (
            ("image", "crops", "", True),
            ("image", "captioner", "", True),
            ("captioner", "ensemble", "texts", True),
            ("crops", "ensemble", "", True),
            ("text", "ensemble", "", True),
            ("ensemble", "shards", "once", True),
            ("shards", "vision", "", False),
            ("shards", "words", "", False),
            ("vision", "loss", "", False),
            ("words", "loss", "", False),
            ("shards", "loss", "embeddings", True),
        ),
    ),
    "shre": Diagram(
        {
            "image": Box("image", "data", 0, 2),
            "text": Box("caption", "data", 0, 3),
            "teacher": Box("classifier", "frozen", 2.3, 1),
            "vision": Box("image encoder", "trained", 2.3, 2),
            "words": Box("text encoder", "trained", 2.3, 3),
            "shared": Box("shared layers:\nh2, h1, h3", "trained", 4.9, 2.5),
            "kl": Box("KL divergence\nfrom its classes", "loss", 7.6, 1.5),
            "contrast": Box("contrast of\nimage and text", "loss", 7.6, 2.9),
        },
        (
            ("image", "teacher", "", False),
            ("image", "vision", "", False),
            ("text", "words", "", False),
            ("vision", "shared", "", False),
            ("words", "shared", "", False),
            ("shared", "kl", "h3 of both", False),
            ("teacher", "kl", "posterior", True),
            ("shared", "contrast", "h2 and h3", False),
        ),
    ),
}


def draw(diagram: Diagram, target: Path) -> None:
    """Draw a diagram on white, which is readable on light and dark pages.

    Args:
        diagram: The boxes and arrows.
        target: The SVG file to write. Equal diagrams give equal files.
    """
    boxes = diagram.boxes.values()
    left, right = min(box.column for box in boxes) - 1.05, max(box.column for box in boxes) + 1.05
    top, bottom = min(box.row for box in boxes) - 0.5, max(box.row for box in boxes) + 0.95
    figure, axis = plt.subplots(figsize=((right - left) * 0.92, (bottom - top) * 0.92), facecolor="white")
    axis.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axis.set_axis_off()
    drawn = {name: _box(axis, box) for name, box in diagram.boxes.items()}
    for start, end, words, dashed in diagram.arrows:
        _arrow(axis, drawn[start], drawn[end], diagram.boxes[start], diagram.boxes[end], words, dashed)
    kinds = [kind for kind in KINDS if any(box.kind == kind for box in boxes)]
    for number, kind in enumerate(kinds):
        x = left + 0.2 + number * (right - left) / 6.2
        axis.add_patch(FancyBboxPatch((x, bottom - 0.32), 0.22, 0.16, "round,pad=0.02", fc=COLORS[kind], ec="#444444"))
        axis.text(x + 0.36, bottom - 0.24, KINDS[kind], va="center", fontsize=8, color="#222222")
    figure.subplots_adjust(0, 0, 1, 1)
    with plt.rc_context({"svg.hashsalt": target.stem, "svg.fonttype": "path"}):
        figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def _box(axis: Axes, box: Box) -> FancyBboxPatch:
    height = HEIGHT if box.text.count("\n") < 2 else 1.35 * HEIGHT
    corner = (box.column - WIDTH / 2, box.row - height / 2)
    patch = FancyBboxPatch(corner, WIDTH, height, "round,pad=0.06", fc=COLORS[box.kind], ec="#444444", zorder=3)
    axis.add_patch(patch)
    axis.text(box.column, box.row, box.text, ha="center", va="center", fontsize=9, color="#111111", zorder=4)
    return patch


def _arrow(
    axis: Axes, tail: FancyBboxPatch, head: FancyBboxPatch, start: Box, end: Box, words: str, dashed: bool
) -> None:
    arrow = FancyArrowPatch(
        (start.column, start.row),
        (end.column, end.row),
        patchA=tail,
        patchB=head,
        arrowstyle="-|>",
        mutation_scale=12,
        color="#444444",
        linestyle="--" if dashed else "-",
        zorder=2,
    )
    axis.add_patch(arrow)
    if words:
        middle = ((start.column + end.column) / 2, (start.row + end.row) / 2)
        style = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"}
        axis.text(*middle, words, ha="center", va="center", fontsize=7.5, color="#222222", bbox=style, zorder=2.5)


if __name__ == "__main__":
    for name, diagram in DIAGRAMS.items():
        draw(diagram, DOCS / "images" / f"diagram_{name}.svg")
