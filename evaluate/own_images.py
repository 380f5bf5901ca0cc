"""One's own classes on one's own images: the best classes of each image, as a table and as a page."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image

from ..common.errors import UserError
from ..common.files import replacing
from ..datamodules.core.decode import decode_image
from ..datamodules.core.faults import BadSample
from ..datamodules.sources.members import IMAGE_SUFFIXES
from ..metrics.finite import highest
from ..metrics.zero_shot import zero_shot_scores
from .encoding import Encoded, Loading, encode_classes, encode_images
from .model import ImageTextModel
from .row_sets import NamedImages

TEMPERATURE = 100.0
"""Of CLIP's logits."""
TEMPLATES = ("a photo of a {}.", "a photo of the {}.", "an image of a {}.")
"""Prompts where none are given."""
_SIDE = 160  # of a thumbnail, pixels


def image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder and of the folders in it, in order."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def classify_folder(
    model: ImageTextModel, folder: Path, names: Sequence[str], templates: Sequence[str], loading: Loading, best: int = 5
) -> tuple[pyarrow.Table, Encoded]:
    """Classify the images of a folder and of the folders in it.

    Returns:
        A table with `image`, the path below the folder, `classes` and `scores`, the best classes of the image and the
        softmax of 100 times their cosines, best first; and the images.

    Raises:
        UserError: If the folder has no image that can be used.
    """
    samples = NamedImages({str(path.relative_to(folder)): path for path in image_files(folder)}, model.transform)
    found = encode_images(model, samples, loading)
    if not len(found.index):
        why = ", ".join(f"{cause}: {count}" for cause, count in found.bad.items()) or "no image files"
        raise UserError(f"Expected images in {str(folder)!r}, got none that can be used ({why}): give another folder.")
    scores = zero_shot_scores(found.features, encode_classes(model, names, templates))
    top = highest((TEMPERATURE * scores).softmax(1), best)
    columns: dict[str, Any] = {
        "image": [samples.names[number] for number in found.index.tolist()],
        "classes": [[names[place] for place in row] for row in top.indices.tolist()],
        "scores": top.values.tolist(),
    }
    types = {
        "image": pyarrow.string(),
        "classes": pyarrow.list_(pyarrow.string()),
        "scores": pyarrow.list_(pyarrow.float32()),
    }
    return pyarrow.table(columns, schema=pyarrow.schema(types)), found


def write_table(table: pyarrow.Table, file: Path) -> None:
    """Write a Parquet file, complete or not at all."""
    with replacing(file) as staged:
        pyarrow.parquet.write_table(table, staged)


def write_sheet(table: pyarrow.Table, folder: Path, file: Path, limit: int = 500) -> None:
    """Write a page with the images below their best class, the surest first.

    The page holds the thumbnails itself, and so can be sent to others.

    Args:
        table: Of `classify_folder`.
        folder: Folder of the images.
        file: The page.
        limit: Images of each class that are shown.
    """
    by_class: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: -row["scores"][0]):
        by_class.setdefault(row["classes"][0], []).append(row)
    parts = [_HEAD]
    for name in sorted(by_class):
        rows = by_class[name]
        parts.append(f"<h2>{html.escape(name)} <small>{len(rows):,}</small></h2><div class=sheet>")
        parts += [_figure(row, folder) for row in rows[:limit]]
        parts.append("</div>")
    with replacing(file) as staged:
        staged.write_text("\n".join(parts), encoding="utf-8")


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
    name, thumbnail = html.escape(row["image"], quote=True), _thumbnail(folder / row["image"])
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
