"""What features depend on beside weights: how images and texts are prepared, and which rows they are of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image

from ..base.samples import Transform
from ..base.sampling import seeded
from ..text.captions import text_id

_PLAIN_DRAWS, _RANDOM_DRAWS = 3, 24
_SIZES = ((61, 83), (97, 40), (48, 48))
_TEXTS = (
    "A dog's bowl, (red) & 2 cats!",
    "Zwei Hunde im Café - 35% OFF: http://a.b/c",
    "photo",
    " ".join(f"word{number} and" for number in range(200)),
)
"""Texts with what cleanings change, and one that is longer than any limit."""


def transform_digest(transform: Transform, random: bool) -> str:
    """Return a hash of what a transform does to images, the same in every process.

    Args:
        transform: RGB image to float [3, H, W], normalized.
        random: whether the transform draws; its draws with many seeds are hashed then.
    """
    digest = hashlib.sha256()
    for number in range(_RANDOM_DRAWS if random else _PLAIN_DRAWS):
        height, width = _SIZES[number % len(_SIZES)]
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        with seeded(number):
            prepared = transform(Image.fromarray(noise))
        digest.update(f"{list(prepared.shape)}".encode())
        digest.update(prepared.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def texts_digest(ids: Callable[[Sequence[str]], torch.Tensor]) -> str:
    """Return a hash of what a tokenizer does to texts, whatever its padding.

    Args:
        ids: texts to token ids, long [T, L].
    """
    digest = hashlib.sha256()
    for text in _TEXTS:
        tokens = ids([text])[0].tolist()
        while len(tokens) > 1 and tokens[-1] == tokens[-2]:
            tokens.pop()
        digest.update(f"{tokens}".encode())
    return digest.hexdigest()


def row_key(path: str | None, data: bytes | None) -> int | None:
    """Return a hash by which a row is known again: of the name of the image's file, else of its content.

    The folder of the file is left out, so that images may move.

    Args:
        path: path or URL of the image's file.
        data: the encoded image, where the data contains it.
    """
    if data is not None:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
    return None if path is None else text_id(os.path.basename(path))
