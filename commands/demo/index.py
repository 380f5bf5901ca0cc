"""Embeddings of the images of a folder and of captions, kept in stores."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common.errors import UserError
from ...common.messages import say
from ...datamodules.stores.shards import NOT_FINITE, ShardRows
from ...datamodules.text.captions import text_id
from ...metrics.finite import highest, non_finite_last
from ..evaluate.encoding import Loading, encode_images, encode_texts
from ..evaluate.kept import image_settings, kept, kept_folder, read_kept, text_settings, write_kept
from ..evaluate.model import ImageTextModel
from ..evaluate.row_sets import NamedImages
from .folder import ImageFolder, Stamp

_BLOCK = 2048  # images between two writes of the store, so that a stopped embedding goes on


class Searched(Protocol):
    """Things that are searched by a text or an image."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the things."""

    def best(self, query: Tensor, count: int) -> list[tuple[str, float]]:
        """Return the names with the highest cosines with a unit-length embedding [E], best first, and the cosines."""

    def log_sum(self, query: Tensor, scale: float) -> float | None:
        """Return the logarithm of the sum of exp(scale x cosine) over all things; None where not all are compared."""


@dataclass(frozen=True)
class Index:
    """Images or captions by name, and their unit-length embeddings [N, E], float32, on the CPU."""

    names: Sequence[str]
    embeddings: Tensor

    def best(self, query: Tensor, count: int) -> list[tuple[str, float]]:
        """Return the names with the highest cosines with a unit-length embedding [E], best first, and the cosines."""
        top = highest(self.embeddings @ query, count)
        return [
            (self.names[index], score) for score, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]

    def log_sum(self, query: Tensor, scale: float) -> float | None:
        """Return the logarithm of the sum of exp(scale x cosine) over all things."""
        return float(non_finite_last(scale * (self.embeddings @ query)).logsumexp(0))


def embed_folder(model: ImageTextModel, folder: ImageFolder, cache: Path, loading: Loading) -> Index:
    """Embed the images of a folder that are new, have changed, or were embedded by another model.

    Raises:
        UserError: If no image can be used.
    """
    settings = image_settings(model, [str(folder.root)])
    store = kept_folder(cache, settings)
    keys = {name: _key(folder.stamp(name)) for name in folder.names}
    rows = read_kept(store) or ShardRows()
    embeddings = {} if rows.features is None else dict(zip(rows.keys, rows.features[:, 0], strict=True))
    missing = [name for name in folder.names if keys[name] not in embeddings]
    if missing:
        say(f"Embedding {len(missing):,} of {len(keys):,} images.")
    embedded = {keys[name]: name for name in folder.names if keys[name] in embeddings}
    bad = 0
    for start in range(0, len(missing), _BLOCK):
        samples = NamedImages({name: folder.content(name) for name in missing[start : start + _BLOCK]}, model.transform)
        encoded = encode_images(model, samples, loading)
        bad += sum(encoded.bad.values())
        # Images that have changed or are gone are left out of the store.
        stored = len(embedded) if set(rows.keys) == set(embedded) else 0
        for number, embedding in zip(encoded.index.tolist(), encoded.features, strict=True):
            name = samples.names[number]
            embeddings[keys[name]] = embedding
            embedded[keys[name]] = name
        if embedded:
            rows = _rows(folder, embedded, embeddings)
            write_kept(store, rows, settings, stored)
        if len(missing) > _BLOCK:
            say(f"Embedded {min(start + _BLOCK, len(missing)):,}.")
    names = [name for name in folder.names if keys[name] in embeddings]
    if not names:
        raise UserError(f"Expected images in {str(folder.root)!r}, got {bad} that cannot be read: give another folder.")
    return Index(names, torch.stack([embeddings[keys[name]] for name in names]))


def _rows(folder: ImageFolder, embedded: Mapping[int, str], embeddings: Mapping[int | None, Tensor]) -> ShardRows:
    """Return the rows of a store of images, by the keys of their stamps."""
    features = torch.stack([embeddings[key] for key in embedded])
    faults = [None if finite else NOT_FINITE for finite in features.isfinite().all(1).tolist()]
    # An image that a table contains has no path.
    names = [name if (path := folder.path(name)) == folder.root else str(path) for name in embedded.values()]
    nothing: list[int | None] = [None] * len(names)
    return ShardRows(names, nothing, list(embedded), faults, features[:, None], [[] for _ in names])


def _key(stamp: Stamp) -> int:
    return text_id(json.dumps(stamp))


def embed_captions(model: ImageTextModel, captions: Sequence[str], cache: Path) -> Index:
    """Embed captions, or read their embeddings."""
    if not captions:
        return Index(captions, torch.zeros(0, 1))

    def encode() -> ShardRows:
        say(f"Embedding {len(captions):,} captions.")
        nothing: list[Any] = [None] * len(captions)
        texts = [[caption] for caption in captions]
        features = encode_texts(model, captions)
        return ShardRows(list(captions), nothing, nothing, nothing, captions=texts, text_features=features)

    rows = kept(cache, partial(text_settings, model, list(captions)), encode)
    assert rows.text_features is not None
    return Index(captions, rows.text_features)
