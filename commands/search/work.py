"""The work of `vlightning search`, after its arguments are parsed."""

import argparse
import json
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...common.errors import UserError
from ...common.shown import shown
from ...datamodules.base.decode import decode_image
from ...datamodules.base.faults import BadSample
from ...datamodules.stores.store import FeatureStore, Side, is_store
from ..evaluate.encoding import encode_texts
from ..evaluate.model import ImageTextModel, load_model, shares_space
from .images import search_images
from .index import StoreSearch


def work(typed: argparse.Namespace) -> str:
    """Search a store, or images by a model.

    Args:
        typed: The parsed arguments.

    Raises:
        UserError: If an argument is wrong, or the store, the model or the images cannot be used.
    """
    if typed.count < 1:
        raise UserError(f"Expected at least 1 after --count, got {typed.count}: increase it.")
    if not is_store(typed.source):
        return search_images(typed)
    if option := next((name for name in ("html", "captions", "caption_column") if getattr(typed, name)), None):
        raise UserError(
            f"Expected a model and a folder of images with --{option}, got the store {typed.source!r}: leave it out."
        )
    store = FeatureStore(typed.source)
    search = StoreSearch(store, cast(Side, typed.of), typed.method)
    model = model_of_store(store, typed.model, typed.weights, typed.by)
    model.network.to(typed.device or "cpu")
    if typed.by == "text":
        queries = encode_texts(model, typed.queries)
    else:
        queries = torch.cat([_image(model, file) for file in typed.queries])
    hits = search.search(queries, typed.count)
    name_of = store.name if typed.of == "image" else store.caption_at
    lines = [search.described(typed.count)]
    for query, rows, scores in zip(typed.queries, hits.row.tolist(), hits.score.tolist(), strict=True):
        lines.append(f"{shown(query)}:")
        for row, score in zip(rows, scores, strict=True):
            lines.append(f"  {score:.4f}  {shown(name_of(row))}")
    return "\n".join(lines)


def model_of_store(store: FeatureStore, model: str | None, weights: str | None, by: Side) -> ImageTextModel:
    """Load the model that a store was embedded with.

    Args:
        store: The store.
        model: As of `load_model`; None for what the store names.
        weights: As of `load_model`.
        by: What the queries are; the weights of the other tower are not read.

    Raises:
        UserError: If there is no such model, or it has other weights.
    """
    record = store.manifest["model"]
    if model is None and record["model"] is None:
        raise UserError(
            f"Expected --model with the store {str(store.folder)!r}, which names none, as the model of a config was "
            "embedded: give it."
        )
    if model is None:
        model = str(record["model"])
        weights = None if record["weights"] == record["model"] else str(record["weights"])
    loaded = load_model(model, weights)
    check_model(store, loaded, (by,))
    return loaded


def check_model(store: FeatureStore, model: ImageTextModel, sides: Sequence[Side] = ("image", "text")) -> None:
    """Check that a model has the weights that a store was embedded with, or a tower that was trained into its space.

    Args:
        store: The store.
        model: The model.
        sides: The towers that encode queries.

    Raises:
        UserError: If it has others.
    """
    record = store.manifest["model"]
    # Layouts differ in the shape of the logit scale, and so in the hash of all weights.
    same_towers = all(record.get(side) == model.tower_digest(side) for side in sides)
    searched = [side for side in ("image", "text") if side in record]
    joined = model.joined is not None and any(shares_space(record, model, side) for side in searched)
    if not same_towers and not joined and model.sha256 != record["sha256"]:
        raise UserError(
            f"Expected the model of the store {str(store.folder)!r}, {json.dumps(record['name'])} (sha256 "
            f"{record['sha256'][:12]}), got other weights (sha256 {model.sha256[:12]}"
            f"{f', of the space {model.joined.fingerprint}' if model.joined else ''}): give that model, or embed the "
            "data again."
        )


def _image(model: ImageTextModel, file: str) -> Tensor:
    try:
        pixels = model.transform(decode_image(None, file, file))
    except BadSample as bad:
        raise UserError(f"Expected an image, got {file!r} ({bad.fault.cause}): correct the path.") from None
    return normalize(model.encode_images(pixels[None]).cpu(), dim=-1)
