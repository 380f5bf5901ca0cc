"""Embeddings of the images of a folder and of captions, kept on disk."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...common.errors import UserError
from ...common.files import WriteError, replacing
from ...common.messages import say, warn
from ...metrics.finite import highest, non_finite_last
from ..evaluate.encoding import Loading, encode_images, encode_texts
from ..evaluate.model import ImageTextModel
from ..evaluate.row_sets import NamedImages
from .folder import ImageFolder, Stamp

_BLOCK = 2048  # images between two writes of the file, so that a stopped embedding goes on


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
    file = cache / f"demo-{_key(model, str(folder.root))}.safetensors"
    stamps = [folder.stamp(name) for name in folder.names]
    embeddings = _read(file)
    missing = [stamp[0] for stamp in stamps if stamp not in embeddings]
    if missing:
        say(f"Embedding {len(missing):,} of {len(stamps):,} images.")
    bad = 0
    for start in range(0, len(missing), _BLOCK):
        samples = NamedImages({name: folder.content(name) for name in missing[start : start + _BLOCK]}, model.transform)
        by_name = {stamp[0]: stamp for stamp in stamps}
        encoded = encode_images(model, samples, loading)
        bad += sum(encoded.bad.values())
        for number, embedding in zip(encoded.index.tolist(), encoded.features, strict=True):
            embeddings[by_name[samples.names[number]]] = embedding
        embedded = [stamp for stamp in stamps if stamp in embeddings]
        if embedded:
            _write(file, torch.stack([embeddings[stamp] for stamp in embedded]), {"images": json.dumps(embedded)})
        if len(missing) > _BLOCK:
            say(f"Embedded {min(start + _BLOCK, len(missing)):,}.")
    embedded = [stamp for stamp in stamps if stamp in embeddings]
    if not embedded:
        raise UserError(f"Expected images in {str(folder.root)!r}, got {bad} that cannot be read: give another folder.")
    return Index([stamp[0] for stamp in embedded], torch.stack([embeddings[stamp] for stamp in embedded]))


def embed_captions(model: ImageTextModel, captions: Sequence[str], cache: Path) -> Index:
    """Embed captions, or read their embeddings."""
    if not captions:
        return Index(captions, torch.zeros(0, 1))
    file = cache / f"demo-{_key(model, json.dumps(captions))}.safetensors"
    with suppress(OSError, SafetensorError), safe_open(file, "pt") as content:
        return Index(captions, content.get_tensor("embeddings"))
    say(f"Embedding {len(captions):,} captions.")
    embeddings = encode_texts(model, captions)
    _write(file, embeddings, {})
    return Index(captions, embeddings)


def _key(model: ImageTextModel, content: str) -> str:
    """Return a name for embeddings, by the weights, the preprocessing of an image of noise, and what is embedded."""
    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    prepared = model.finish(model.transform(Image.fromarray(noise))[None].to(model.device)).cpu()
    fields = (model.sha256.encode(), prepared.numpy().tobytes(), content.encode())
    return hashlib.sha256(b"\0".join(fields)).hexdigest()[:32]


def _read(file: Path) -> dict[Stamp, Tensor]:
    """Return the embeddings in a file; none if it cannot be read."""
    with suppress(OSError, SafetensorError), safe_open(file, "pt") as content:
        stamps: list[list[str | int]] = json.loads(content.metadata()["images"])
        rows = content.get_tensor("embeddings")
        return {(str(name), int(size), int(time)): row for (name, size, time), row in zip(stamps, rows, strict=True)}
    return {}


def _write(file: Path, embeddings: Tensor, metadata: dict[str, str]) -> None:
    try:
        with replacing(file) as staged:
            save_file({"embeddings": embeddings}, staged, metadata)
    except WriteError as error:
        warn(f"The embeddings are not kept: {error}")
