"""`vlightning evaluate --index`: queries of a new tower in the index that an old model wrote."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...callbacks.distributed.collectives import rank
from ...callbacks.writers.retrieval import MODEL_KEY
from ...common.errors import UserError
from ...common.files import replacing
from ...datamodules.base.faults import BadSample
from ...datamodules.stores.identity import row_key
from ...datamodules.stores.shards import FAULT, KEY
from ...datamodules.stores.store import FeatureStore, is_store
from ...datamodules.text.captions import text_id
from ...lightning_modules.core.towers import Space
from ...lightning_modules.losses.new_tower import as_int8
from ...metrics.retrieval import RECALLS, Matches, retrieval_ranks
from .encoding import Loading, encode_images, encode_texts
from .model import ImageTextModel, load_model, shares_space
from .row_sets import PairImages

Format = Literal["float32", "float16", "int8"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""Number formats of an index; the queries have the same."""


@dataclass
class ImageIndex:
    """Image features that a model wrote: a store, or the `image_embeddings.parquet` of a prediction.

    Attributes:
        source: its path.
        features: unit-length features [N, E].
        keys: what each image is known by (`row_key`); None for a row that cannot be used.
        model: fingerprint of the image tower as `image`, and perhaps its space; empty if the file names none.
    """

    source: str
    features: Tensor
    keys: list[int | None]
    model: Mapping[str, Any]

    @cached_property
    def rows(self) -> dict[int, int]:
        """The first row of each image by its key."""
        return {key: row for row, key in reversed(list(enumerate(self.keys))) if key is not None}

    @cached_property
    def first_rows(self) -> Tensor:
        """The first row of the image of each row, long [N]."""
        return torch.tensor([row if key is None else self.rows[key] for row, key in enumerate(self.keys)])


@dataclass(frozen=True)
class IndexResult:
    """Recall of texts in an index, in percent.

    Attributes:
        queries: "old" or "new".
        index: "old", "new", or "mixed", in which every second image is new.
        dimension: length of the prefix of the features.
        format: number format of queries and index.
        images: number of images in the index.
        texts: number of queries.
        recall: recall at 1, 5 and 10, by name.
    """

    queries: str
    index: str
    dimension: int
    format: str
    images: int
    texts: int
    recall: Mapping[str, float]


def evaluate_index(typed: argparse.Namespace, device: torch.device, loading: Loading) -> str:
    """Search an index, and return the table of recalls.

    Args:
        typed: the arguments of `vlightning evaluate`.
        device: device of the models.
        loading: how images are read.

    Raises:
        UserError: If an argument is wrong, or a model is of another space than the index.
    """
    if typed.pairs is None:
        raise UserError("Expected images with captions after --pairs, got none: name a file whose images are indexed.")
    index = read_index(typed.index)
    model = load_model(typed.model, typed.weights)
    old = None if typed.old is None else load_model(typed.old, typed.old_weights)
    for one in (model, old):
        if one is not None:
            check_space(index, one)
            one.network.to(device)
    path = Path(typed.pairs).expanduser()
    images = PairImages(path, model.transform, typed.caption_column)
    numbers, rows = in_index(index, images)
    queries = {"new": Queries.of(model, images, numbers, rows)} if "text" in model.sides else {}
    if old is not None:
        old_captions = PairImages(path, model.transform, typed.old_caption_column or typed.caption_column)
        queries = {"old": Queries.of(old, old_captions, numbers, rows), **queries}
    indexes = {"old": (index.features, index.first_rows)}
    if not queries:
        raise UserError(f"Expected --old with an image tower alone, got {typed.model!r} without texts: add it.")
    if "image" in model.sides and index.model.get("image") != model.tower_digest("image"):
        indexes = _with_new_images(index, model, images, numbers, rows, loading)
    results = []
    for name, asked in queries.items():
        for kind, (features, ids) in indexes.items():
            matches = Matches(ids, asked.row, asked.text_id if typed.match_equal_texts else None)
            for length in typed.dims or [index.features.shape[1]]:
                for number_format in typed.formats:
                    searched, texts = (
                        stored_as(whole[:, :length], number_format) for whole in (features, asked.features)
                    )
                    ranks = retrieval_ranks(searched, texts, matches)[1]
                    recall = {f"r{k}": 100 * float((ranks < k).double().mean()) for k in RECALLS}
                    sizes = len(features), len(texts)
                    results.append(IndexResult(name, kind, length, number_format, *sizes, recall))
    if typed.out and rank() == 0:
        with replacing(Path(typed.out).expanduser()) as staged:
            staged.write_text("".join(f"{json.dumps(asdict(result))}\n" for result in results), encoding="utf-8")
    return f"{len(indexes['old'][0]):,} images, {len(next(iter(queries.values())).row):,} texts\n\n{markdown(results)}"


@dataclass(frozen=True)
class Queries:
    """Captions of indexed images.

    Attributes:
        features: unit-length features [T, E].
        row: row of the index of the image of each, long [T].
        text_id: equal for equal captions, long [T].
    """

    features: Tensor
    row: Tensor
    text_id: Tensor

    @classmethod
    def of(cls, model: ImageTextModel, images: PairImages, numbers: Sequence[int], rows: Sequence[int]) -> "Queries":
        """Encode the captions of some images.

        Args:
            model: the model.
            images: the images.
            numbers: positions of the images.
            rows: row of the index of each.

        Raises:
            UserError: If they have no captions.
        """
        captions = [images.captions(number) for number in numbers]
        texts = [text for several in captions for text in several]
        if not texts:
            raise UserError("Expected captions of the indexed images after --pairs, got none: correct the file.")
        row = [row for row, several in zip(rows, captions, strict=True) for _ in several]
        return cls(
            encode_texts(model, texts), torch.tensor(row), torch.tensor([text_id(text.strip()) for text in texts])
        )


def in_index(index: ImageIndex, images: PairImages) -> tuple[list[int], list[int]]:
    """Return the positions of the images that an index has, and their rows in it.

    Raises:
        UserError: If it has none of them.
    """
    numbers, rows = [], []
    for number in range(len(images)):
        row = next((index.rows[key] for key in _keys(images, number) if key in index.rows), None)
        if row is not None:
            numbers.append(number)
            rows.append(row)
    if not rows:
        raise UserError(
            f"Expected images of the index {index.source!r} after --pairs, got none of them: give the pairs of the "
            "images that are indexed, under the same names."
        )
    return numbers, rows


def _keys(images: PairImages, number: int) -> list[int | None]:
    """Return what an image may be known by in an index: its file or content, and its name in a table."""
    row = images.rows[number][0]
    try:
        image = images.table.stored_image(row)
        return [row_key(image.path, image.data), row_key(images.table.image_name(row), None)]
    except BadSample:
        return []


def _with_new_images(
    index: ImageIndex,
    model: ImageTextModel,
    images: PairImages,
    numbers: Sequence[int],
    rows: Sequence[int],
    loading: Loading,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return features and rows of the images of the pairs by the old image tower, by the new one, and by both.

    Other images of the index are left out: the new tower has not seen them.
    """
    row_of = dict(zip(numbers, rows, strict=True))
    encoded = encode_images(model, images, loading)
    kept = [position for position, number in enumerate(encoded.index.tolist()) if number in row_of]
    ids = torch.tensor([row_of[int(encoded.index[position])] for position in kept])
    new, old = encoded.features[kept], index.features[ids]
    every_second = (torch.arange(len(ids)) % 2 == 0)[:, None]
    return {"old": (old, ids), "new": (new, ids), "mixed": (torch.where(every_second, new, old), ids)}


def read_index(source: str) -> ImageIndex:
    """Read a store, or the Parquet file of the image embeddings of a prediction.

    Raises:
        UserError: If it is neither, or has no image features of both towers' space.
    """
    if is_store(source):
        store = FeatureStore(source)
        if store.sides["image"] is None or not store.sides["image"]["projected"] or store.views:
            raise UserError(
                f"Expected plain views of images in the space of both towers in the store {source!r}, got others: "
                "embed the images with the trained model."
            )
        width = store.width("image")
        features = np.concatenate([shard.images[:, :width] for shard in store.shards])
        keys = [key for shard in store.shards for key in shard.values(KEY)]
        faulty = [cause is not None for shard in store.shards for cause in shard.values(FAULT)]
        known = [None if bad or key is None else int(key) for key, bad in zip(keys, faulty, strict=True)]
        return ImageIndex(source, normalize(torch.from_numpy(features).float(), dim=-1), known, store.manifest["model"])
    return _read_parquet(source)


def _read_parquet(source: str) -> ImageIndex:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(source).expanduser()
    try:
        table = pq.read_table(path, columns=["image", "embedding"])
        features = np.stack(table["embedding"].to_numpy())
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise UserError(
            "Expected a store of `vlightning embed`, or an image_embeddings.parquet of `vlightning predict`, as "
            f"--index, got {source!r} ({type(error).__name__}): correct the path."
        ) from error
    record = (table.schema.metadata or {}).get(MODEL_KEY)
    keys = [row_key(name, None) for name in table["image"].to_pylist()]
    unit = normalize(torch.from_numpy(features).float(), dim=-1)
    return ImageIndex(source, unit, keys, {} if record is None else json.loads(record))


def check_space(index: ImageIndex, model: ImageTextModel) -> None:
    """Check that a model is of the space of an index.

    Raises:
        UserError: If it is not, or the index does not say which space it has.
    """
    if not index.model:
        raise UserError(
            f"Expected an index that names its space, got {index.source!r} without: write it again with `vlightning "
            "predict` or `vlightning embed`."
        )
    if not shares_space(index.model, model, "image"):
        space = Space.of(index.model)
        got = f"the space {space.fingerprint}" if space else f"the image tower {str(index.model.get('image'))[:12]}"
        raise UserError(
            f"Expected a model of the space of the index {index.source!r}, which has {got}, got {model.name} of the "
            f"space {model.space.fingerprint}: embed the images with it, or give a model of that space."
        )


def stored_as(features: Tensor, number_format: Format) -> Tensor:
    """Return features [N, d] as an index in a number format holds them, of unit length."""
    unit = normalize(features.float(), dim=-1)
    if number_format == "int8":
        return as_int8(unit)
    return normalize(unit.half().float(), dim=-1) if number_format == "float16" else unit


def markdown(results: Sequence[IndexResult]) -> str:
    """Return the table of recalls."""
    lines = ["| queries | index | dimension | format | R@1 | R@5 | R@10 |", "|---|---|---|---|---|---|---|"]
    for one in results:
        recall = " | ".join(f"{value:.2f}" for value in one.recall.values())
        lines.append(f"| {one.queries} | {one.index} | {one.dimension} | {one.format} | {recall} |")
    return "\n".join(lines)
