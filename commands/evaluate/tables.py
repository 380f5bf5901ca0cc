"""Metrics of the sets that are tables: retrieval, WinoGAViL, and captions with a wrong one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ...metrics.finite import highest
from ...metrics.groups import jaccard
from ...metrics.retrieval import Matches, recalls, retrieval_ranks
from .encoding import Encoded, Loading, encode_images, encode_texts
from .model import ImageTextModel
from .row_sets import NamedImages, PairImages, read_rows


def retrieval(model: ImageTextModel, path: Path, loading: Loading) -> tuple[dict[str, float], Encoded]:
    """Return recall at 1, 5 and 10 in both directions, and `mean_recall@1`, from 0 to 1.

    Captions of images that cannot be used are left out with them.
    """
    samples = PairImages(path, model.transform)
    found = encode_images(model, samples, loading)
    captions = [samples.captions(number) for number in found.index.tolist()]
    owners = torch.tensor([owner for owner, texts in enumerate(captions) for _ in texts], dtype=torch.long)
    if not len(owners):
        raise UserError(f"Expected images with captions in {str(path)!r}, got none that can be used: correct the set.")
    texts = encode_texts(model, [text for own in captions for text in own])
    ranks = retrieval_ranks(found.features, texts, Matches(torch.arange(len(captions)), owners))
    percent = recalls(*ranks)
    names = {"text_to_image": "image_retrieval_recall", "image_to_text": "text_retrieval_recall"}
    metrics = {f"{names[way]}@{k}": percent[f"{way}_r{k}"] / 100 for way in names for k in (1, 5, 10)}
    metrics["mean_recall@1"] = sum(metrics[f"{name}@1"] for name in names.values()) / 2
    return metrics, found


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
        given = (
            row.get("candidates_images")
            or row.get("candidate_images")
            or [folder / f"{name}.jpg" for name in row["candidates"]]
        )
        if len(given) != len(row["candidates"]) or not set(row["associations"]) & set(row["candidates"]):
            raise UserError(
                f"Expected an image of each candidate and an association among them in row {number} of {str(path)!r}, "
                "got another row: correct it."
            )
        images |= {name: _content(image) for name, image in zip(row["candidates"], given, strict=True)}
    samples = NamedImages(images, model.transform)
    found = encode_images(model, samples, loading)
    place = {samples.names[number]: row for row, number in enumerate(found.index.tolist())}
    rows = [row for row in rows if all(name in place for name in row["candidates"])]
    if not rows:
        raise UserError(f"Expected a row in {str(path)!r} whose images can be used, got none: get the set again.")
    cues = encode_texts(model, [cue_prompt(row["cue"]) for row in rows])
    scores: dict[int, list[float]] = {}
    for row, cue in zip(rows, cues, strict=True):
        similarity = found.features[[place[name] for name in row["candidates"]]] @ cue
        right = torch.tensor([name in row["associations"] for name in row["candidates"]])
        chosen = torch.zeros_like(right)
        chosen[highest(similarity, int(right.sum())).indices] = True
        scores.setdefault(len(right), []).append(jaccard(chosen, right))
    return _by_candidates(scores), found


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
    found = encode_images(model, samples, loading)
    place = {samples.names[number]: row for row, number in enumerate(found.index.tolist())}
    used = [(row, place[key]) for row, key in zip(rows, keys, strict=True) if key in place]
    if not used:
        raise UserError(f"Expected a row in {str(path)!r} whose image can be used, got none: correct the set.")
    right, wrong = (encode_texts(model, [row[name] for row, _ in used]) for name in ("caption", "negative"))
    features = found.features[[row for _, row in used]]
    nearer: Tensor = (features * right).sum(1) > (features * wrong).sum(1)
    return {"acc1": float(nearer.double().mean())}, found


def _content(image: Any) -> bytes | Path:
    """Return an encoded image, or the path of its file, from a value of a table."""
    if isinstance(image, dict):
        image = image.get("bytes") or Path(str(image.get("path")))
    return image if isinstance(image, bytes | Path) else b""  # which is counted as no image
