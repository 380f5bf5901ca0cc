"""Sets that are tables, and their metrics: image-text retrieval, WinoGAViL, and captions with a wrong one.

A table is a folder of Parquet files, a JSON-lines file, or what else the project's datamodules read, at
`<root>/<folder>`, `<root>/<folder>/<folder>.jsonl` or `<root>/<folder>.jsonl`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ...datamodules.base.decode import MAX_PIXELS, decode_image
from ...datamodules.base.faults import BadSample
from ...datamodules.base.samples import Transform
from ...datamodules.reading.open import Opening
from ...datamodules.reading.table import PairTable
from ...metrics.finite import highest
from ...metrics.groups import jaccard
from ...metrics.retrieval import Matches, recalls, retrieval_ranks
from .encoding import Encoded, Loading, Sample, encode_images, encode_texts
from .model import ImageTextModel

_ENDINGS = ("", ".jsonl", ".json", ".parquet", ".csv")


def find_table(root: Path, folder: str) -> Path | None:
    """Return the path of a table; None if there is none."""
    names = (f"{folder}/{folder}.jsonl", *(f"{folder}{ending}" for ending in _ENDINGS))
    return next((path for name in names if (path := root / name).exists()), None)


class PairImages(torch.utils.data.Dataset[Sample]):
    """The images of a table of images and captions; `table.images` holds the rows of each image.

    The table has columns `image`, and `caption` or another one of captions.
    """

    def __init__(self, path: Path, transform: Transform, caption: str = "caption") -> None:
        opening = Opening(None, "image", caption, None, None)
        self.table = PairTable([opening.open(str(path), "test")], MAX_PIXELS)
        self.rows = self.table.images()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Sample:
        """Return an image; raises `BadSample` if it cannot be used."""
        return Sample(self.transform(self.table.image(self.rows[number][0])))

    def captions(self, number: int) -> list[str]:
        """Return the captions of an image that are not empty."""
        texts = []
        for row in self.rows[number]:
            try:
                texts += [text for text in self.table.captions(row) if text.strip()]
            except BadSample:
                continue  # the image is counted when it is read
        return texts


class NamedImages(torch.utils.data.Dataset[Sample]):
    """Images by name, each once: encoded, or paths of files; `transform` makes them uint8 [3, S, S]."""

    def __init__(self, images: dict[str, bytes | Path], transform: Transform) -> None:
        self.names = list(images)
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Sample:
        """Return an image; raises `BadSample` if it cannot be used."""
        content = self.images[name := self.names[number]]
        data, path = (content, None) if isinstance(content, bytes) else (None, str(content))
        return Sample(self.transform(decode_image(data, path, path or name)))


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table, a folder of Parquet files or JSON lines, each with certain columns.

    Raises:
        UserError: If the table cannot be read, is empty, or lacks a column.
    """
    if path.suffix in (".jsonl", ".json"):
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise UserError(f"Expected JSON lines in {str(path)!r}, got another file ({error}): correct it.") from None
    else:
        rows = _parquet_rows(path)
    if not rows:
        raise UserError(f"Expected rows in {str(path)!r}, got none: get the set again.")
    for number, row in enumerate(rows):
        missing = [column for column in columns if not isinstance(row, dict) or column not in row]
        if missing:
            raise UserError(
                f"Expected {', '.join(columns)} in each row of {str(path)!r}, got row {number} without "
                f"{', '.join(missing)}: correct it."
            )
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of Parquet files, or of the Arrow files that `datasets` saves."""
    import pyarrow
    import pyarrow.parquet

    def read(file: Path) -> Any:
        if file.suffix != ".arrow":
            return pyarrow.parquet.read_table(file)
        with pyarrow.memory_map(str(file)) as content:
            return pyarrow.ipc.open_stream(content).read_all()

    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.parquet")) or sorted(path.rglob("*.arrow"))
    try:
        return [row for file in files for row in read(file).to_pylist()]
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(
            f"Expected Parquet files in {str(path)!r}, got an error ({error}): get the set again."
        ) from None


def retrieval(model: ImageTextModel, path: Path, loading: Loading) -> tuple[dict[str, float], Encoded]:
    """Return recall at 1, 5 and 10 in both directions, and `mean_recall@1`, from 0 to 1.

    Captions of images that cannot be used are left out with them.
    """
    samples = PairImages(path, model.transform)
    images = encode_images(model, samples, loading)
    captions = [samples.captions(number) for number in images.index.tolist()]
    image_of_caption = torch.tensor([number for number, texts in enumerate(captions) for _ in texts], dtype=torch.long)
    if not len(image_of_caption):
        raise UserError(f"Expected images with captions in {str(path)!r}, got none that can be used: correct the set.")
    texts = encode_texts(model, [text for texts_of_image in captions for text in texts_of_image])
    ranks = retrieval_ranks(images.features, texts, Matches(torch.arange(len(captions)), image_of_caption))
    percent = recalls(*ranks)
    names = {"text_to_image": "image_retrieval_recall", "image_to_text": "text_retrieval_recall"}
    metrics = {f"{names[way]}@{k}": percent[f"{way}_r{k}"] / 100 for way in names for k in (1, 5, 10)}
    metrics["mean_recall@1"] = sum(metrics[f"{name}@1"] for name in names.values()) / 2
    return metrics, images


def winogavil(model: ImageTextModel, path: Path, loading: Loading) -> tuple[dict[str, float], Encoded]:
    """Return the mean Jaccard index of WinoGAViL's rows, from 0 to 1: of all, and by number of candidates.

    A row has a `cue`, names of `candidates`, and `associations`, those that belong to the cue; `candidates_images` or
    `candidate_images` holds the images, or else `images/<candidate>.jpg` beside the table. As many candidates are
    chosen as there are associations.

    Raises:
        UserError: If a row is of another form.
    """
    rows = read_rows(path, ("cue", "candidates", "associations"))
    images: dict[str, bytes | Path] = {}
    folder = (path if path.is_dir() else path.parent) / "images"
    for number, row in enumerate(rows):
        images_of_row = (
            row.get("candidates_images")
            or row.get("candidate_images")
            or [folder / f"{name}.jpg" for name in row["candidates"]]
        )
        if len(images_of_row) != len(row["candidates"]) or not set(row["associations"]) & set(row["candidates"]):
            raise UserError(
                f"Expected an image of each candidate and an association among them in row {number} of {str(path)!r}, "
                "got another row: correct it."
            )
        images |= {name: _content(image) for name, image in zip(row["candidates"], images_of_row, strict=True)}
    samples = NamedImages(images, model.transform)
    encoded = encode_images(model, samples, loading)
    image_rows = {samples.names[number]: row for row, number in enumerate(encoded.index.tolist())}
    rows = [row for row in rows if all(name in image_rows for name in row["candidates"])]
    if not rows:
        raise UserError(f"Expected a row in {str(path)!r} whose images can be used, got none: get the set again.")
    cues = encode_texts(model, [cue_prompt(row["cue"]) for row in rows])
    scores: dict[int, list[float]] = {}
    for row, cue in zip(rows, cues, strict=True):
        similarity = encoded.features[[image_rows[name] for name in row["candidates"]]] @ cue
        right = torch.tensor([name in row["associations"] for name in row["candidates"]])
        chosen = torch.zeros_like(right)
        chosen[highest(similarity, int(right.sum())).indices] = True
        scores.setdefault(len(right), []).append(jaccard(chosen, right))
    return _by_candidates(scores), encoded


def _by_candidates(scores: Mapping[int, list[float]]) -> dict[str, float]:
    def mean(name: str, sizes: list[int]) -> dict[str, float]:
        values = [value for size in sizes for value in scores.get(size, [])]
        return {name: sum(values) / len(values)} if values else {}

    metrics = mean("avg_jaccard_score", sorted(scores))
    for size in sorted(scores):
        metrics |= mean(f"jaccard_score_{size}", [size])
    metrics |= mean("jaccard_score_5-6", [size for size in sorted(scores) if size <= 6])
    return metrics | mean("jaccard_score_10-12", [size for size in sorted(scores) if size >= 10])


def cue_prompt(cue: str) -> str:
    """Return WinoGAViL's prompt: "A" or "An" before the cue in lower case."""
    cue = cue.lower()
    return f"{'An' if cue[:1] in tuple('aeiou') else 'A'} {cue}"


def negatives(model: ImageTextModel, path: Path, loading: Loading) -> tuple[dict[str, float], Encoded]:
    """Return the share of the images that are nearer to their caption than to the wrong one (SugarCrepe).

    A row has `image`, the path of a file below the table's folder or encoded bytes, `caption` and `negative`.
    """
    rows = read_rows(path, ("image", "caption", "negative"))
    folder = path if path.is_dir() else path.parent
    images: dict[str, bytes | Path] = {}
    keys = []
    for number, row in enumerate(rows):
        content = row["image"] if not isinstance(row["image"], str) else folder / row["image"]
        keys.append(str(row["image"]) if isinstance(row["image"], str) else f"{path}, row {number}")
        images[keys[-1]] = _content(content)
    samples = NamedImages(images, model.transform)
    encoded = encode_images(model, samples, loading)
    image_rows = {samples.names[number]: row for row, number in enumerate(encoded.index.tolist())}
    usable = [(row, image_rows[key]) for row, key in zip(rows, keys, strict=True) if key in image_rows]
    if not usable:
        raise UserError(f"Expected a row in {str(path)!r} whose image can be used, got none: correct the set.")
    right, wrong = (encode_texts(model, [row[name] for row, _ in usable]) for name in ("caption", "negative"))
    features = encoded.features[[row for _, row in usable]]
    nearer: Tensor = (features * right).sum(1) > (features * wrong).sum(1)
    return {"acc1": float(nearer.double().mean())}, encoded


def _content(image: Any) -> bytes | Path:
    """Return an encoded image, or the path of its file, from a value of a table."""
    if isinstance(image, dict):
        image = image.get("bytes") or Path(str(image.get("path")))
    return image if isinstance(image, bytes | Path) else b""  # which is counted as no image
