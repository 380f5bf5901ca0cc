"""The user's classes on a folder of images: the best classes of each image, as a table and as a page."""

import base64
import html
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image

from ...common.errors import UserError
from ...common.files import replacing
from ...datamodules.base.decode import decode_image
from ...datamodules.base.faults import BadSample
from ...datamodules.reading.tar import IMAGE_SUFFIXES
from ...metrics.classification import zero_shot_scores
from ...metrics.finite import highest
from .encoding import Encoded, Loading, encode_classes, encode_images
from .model import ImageTextModel
from .row_sets import NamedImages

TEMPLATES = ("a photo of a {}.", "a photo of the {}.", "an image of a {}.")
"""Prompts where none are given."""
_FOLDERS = 10  # that a message names
_SIDE = 160  # of a thumbnail, pixels
_NO_CLASS = "(non-finite)"  # instead of the class of an image with a non-finite embedding


def image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder and of the folders in it, in order."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def classify_folder(
    model: ImageTextModel, folder: Path, names: Sequence[str], templates: Sequence[str], loading: Loading, best: int = 5
) -> tuple[pyarrow.Table, Encoded]:
    """Classify the images of a folder and of the folders in it.

    Returns:
        A table with `image`, the path below the folder, `classes` and `scores`, the best classes of the image and the
        softmax of their cosines over the model's temperature, best first (none for an image with a non-finite
        embedding), and `label`, the name of the folder of the image if that is a class; and the images.

    Raises:
        UserError: If the folder has no image that can be used.
    """
    samples = NamedImages({str(path.relative_to(folder)): path for path in image_files(folder)}, model.transform)
    encoded = encode_images(model, samples, loading)
    if not len(encoded.index):
        causes = ", ".join(f"{cause}: {count}" for cause, count in encoded.bad.items()) or "no image files"
        raise UserError(
            f"Expected images in {str(folder)!r}, got none that can be used ({causes}): give another folder."
        )
    scores = zero_shot_scores(encoded.features, encode_classes(model, names, templates))
    top = highest(model.shares(scores), best)
    finite = scores.isfinite().all(1).tolist()
    images = [samples.names[number] for number in encoded.index.tolist()]
    columns: dict[str, Any] = {
        "image": images,
        "label": [label_of(image, names) for image in images],
        "classes": [
            [names[index] for index in row] if usable else []
            for row, usable in zip(top.indices.tolist(), finite, strict=True)
        ],
        "scores": [row if usable else [] for row, usable in zip(top.values.tolist(), finite, strict=True)],
    }
    types = {
        "image": pyarrow.string(),
        "label": pyarrow.string(),
        "classes": pyarrow.list_(pyarrow.string()),
        "scores": pyarrow.list_(pyarrow.float32()),
    }
    return pyarrow.table(columns, schema=pyarrow.schema(types)), encoded


def label_of(image: str, names: Sequence[str]) -> str | None:
    """Return the class that the first folder of an image's path is named after, in any case of letters; else None."""
    folder = Path(image).parts[0]
    if folder == image:
        return None
    return folder if folder in names else next((name for name in names if name.lower() == folder.lower()), None)


def folders_without_class(table: pyarrow.Table) -> str:
    """Return a sentence about images in folders that no class is named after; empty if there are none."""
    rows = [row for row in table.to_pylist() if row["label"] is None]
    folders = Counter(Path(row["image"]).parts[0] for row in rows if len(Path(row["image"]).parts) > 1)
    if not folders:
        return ""
    named = ", ".join(f"{folder!r} ({count:,})" for folder, count in sorted(folders.items())[:_FOLDERS])
    more = f" and {len(folders) - _FOLDERS} more" if len(folders) > _FOLDERS else ""
    return f"No class has the name of these folders, whose images count for no accuracy: {named}{more}."


def folders_of_images(folder: Path) -> list[str]:
    """Return the names of the folders with images, in order, if all images of a folder are in such; else none."""
    relative = [path.relative_to(folder).parts for path in image_files(folder)]
    return [] if any(len(path) == 1 for path in relative) else sorted({path[0] for path in relative})


def confusion(table: pyarrow.Table, names: Sequence[str]) -> str | None:
    """Return accuracy and a table of labels by predicted classes as Markdown; None if no image has a label."""
    rows = [row for row in table.to_pylist() if row["label"] is not None]
    if not rows:
        return None
    counts = Counter((row["label"], row["classes"][0] if row["classes"] else _NO_CLASS) for row in rows)
    columns = [*names, *([_NO_CLASS] if any(name == _NO_CLASS for _, name in counts) else [])]
    right = sum(counts[name, name] for name in names)
    lines = [
        f"Accuracy: {100 * right / len(rows):.2f}% of {len(rows):,} images in folders of their classes.",
        "",
        f"| label | {' | '.join(columns)} | right |",
        f"|---|{'---:|' * (len(columns) + 1)}",
    ]
    labels = {label for label, _ in counts}
    for label in dict.fromkeys(name for name in names if name in labels):
        row = [counts[label, name] for name in columns]
        lines.append(f"| {label} | {' | '.join(map(str, row))} | {100 * counts[label, label] / sum(row):.1f}% |")
    return "\n".join(lines)


def write_table(table: pyarrow.Table, file: Path) -> None:
    """Write a Parquet file, complete or not at all."""
    with replacing(file) as staged:
        pyarrow.parquet.write_table(table, staged)


def write_sheet(table: pyarrow.Table, folder: Path, file: Path, limit: int = 500) -> None:
    """Write a page with the images below their best class, the surest first, at most `limit` of each class.

    The page holds the thumbnails itself, and so can be sent to others.
    """
    by_class: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: -max(row["scores"], default=0.0)):
        by_class.setdefault(row["classes"][0] if row["classes"] else _NO_CLASS, []).append(row)
    lines = [_HEAD]
    for name in sorted(by_class):
        rows = by_class[name]
        lines.append(f"<h2>{html.escape(name)} <small>{len(rows):,}</small></h2><div class=sheet>")
        lines += [_figure(row, folder) for row in rows[:limit]]
        lines.append("</div>")
    with replacing(file) as staged:
        staged.write_text("\n".join(lines), encoding="utf-8")


_HEAD = """<!doctype html><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>Classes of images</title>
<style>body{font:14px system-ui,sans-serif;margin:1rem;color-scheme:light dark}
.sheet{display:flex;flex-wrap:wrap;gap:.5rem}figure{margin:0;width:160px}
img{width:160px;height:160px;object-fit:contain;background:#8882}
figcaption{font-size:12px;overflow-wrap:anywhere}small{opacity:.6}</style>"""


def _figure(row: dict[str, Any], folder: Path) -> str:
    best = "<br>".join(
        f"{html.escape(name)} {score:.0%}" for name, score in zip(row["classes"][:3], row["scores"], strict=False)
    )
    name = html.escape(row["image"], quote=True)
    thumbnail = _thumbnail(folder / row["image"])
    return (
        f'<figure><img loading=lazy alt="{name}" src="{thumbnail}">'
        f"<figcaption>{best}<br><small>{name}</small></figcaption></figure>"
    )


def _thumbnail(path: Path) -> str:
    """Return a JPEG as a data address; empty for an image that can no longer be read."""
    try:
        image: Image.Image = decode_image(None, str(path), str(path)).copy()
    except BadSample:
        return ""
    image.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
