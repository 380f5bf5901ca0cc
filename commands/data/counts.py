"""Counts of the images and texts of a split."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...datamodules.text.captions import ALL_WORDS, text_id
from ...datamodules.text.tokenizers import Encoder
from .reading import Read, Reading

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Shares of the quantiles."""
NAMED = 5
"""Number of duplicates, of frequent texts and of unreadable images that are named."""
_TEXTS_AT_ONCE = 1024


class Counts:
    """Counts of a split, updated image by image.

    Args:
        encoder: encoder of the texts.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.images = self.bytes = self.texts = self.empty = self.cut_words = 0
        self.hashes: dict[bytes, str] = {}
        self.duplicates: list[tuple[str, str]] = []
        self.repeated = 0
        self.text_counts: Counter[int] = Counter()
        self.frequent: dict[int, str] = {}
        self.lengths: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.causes: Counter[str] = Counter()
        self.unreadable: list[str] = []
        self.texts_of_image: list[int] = []
        self._waiting: list[str] = []

    def add(self, read: Read) -> None:
        """Add an image with its texts."""
        self.images += bool(read.sizes) or bool(read.faults)
        self.bytes += read.size
        self.sizes += read.sizes
        for fault in read.faults:
            self.causes[fault.cause] += 1
            if len(self.unreadable) < NAMED:
                self.unreadable.append(f"{fault.name} ({fault.cause})")
        for content in read.hashes:
            if content not in self.hashes:
                self.hashes[content] = read.name
                continue
            self.repeated += 1
            if len(self.duplicates) < NAMED:
                self.duplicates.append((self.hashes[content], read.name))
        self.texts_of_image.append(len(read.texts))
        for text in read.texts:
            self._add_text(text)

    def _add_text(self, text: str) -> None:
        self.texts += 1
        if not self.encoder.usable(text):
            self.empty += 1
            return
        whole, seen = (self.encoder.cleaned(text, words).strip() for words in (ALL_WORDS, self.encoder.max_words))
        self.cut_words += whole != seen
        key = text_id(seen)
        self.text_counts[key] += 1
        if self.text_counts[key] == 2:
            self.frequent[key] = seen
        self._waiting.append(text)
        if len(self._waiting) == _TEXTS_AT_ONCE:
            self._measure()

    def _measure(self) -> None:
        self.lengths += self.encoder.lengths(self._waiting)
        self._waiting = []

    def result(self, input_size: int | None) -> dict[str, Any]:
        """Return the counts as plain data.

        Args:
            input_size: shorter side of the model's images in pixels; None if it is unknown.
        """
        self._measure()
        sides = np.array(self.sizes, dtype=float).reshape(-1, 2)
        frequent = sorted(self.frequent, key=lambda key: -self.text_counts[key])[:NAMED]
        max_tokens = self.encoder.max_tokens
        return {
            "images_read": self.images,
            "bytes": self.bytes,
            "texts": self.texts,
            "texts_of_an_image": quantiles(self.texts_of_image),
            "duplicate_images": self.repeated,
            "examples_of_duplicate_images": self.duplicates,
            "unreadable": dict(self.causes.most_common()),
            "examples_of_unreadable": self.unreadable,
            "duplicate_texts": self.text_counts.total() - len(self.text_counts),
            "most_frequent_texts": [[self.frequent[key], self.text_counts[key]] for key in frequent],
            "empty_texts": self.empty,
            "max_tokens": max_tokens,
            "over_long_texts": sum(length > max_tokens for length in self.lengths),
            "texts_cut_to_max_words": self.cut_words,
            "tokens": quantiles(self.lengths),
            "width": quantiles(sides[:, 0]),
            "height": quantiles(sides[:, 1]),
            "aspect_ratio": quantiles(sides[:, 0] / sides[:, 1]),
            "input_size": input_size,
            "smaller_than_input": None if input_size is None else int((sides.min(axis=1) < input_size).sum()),
        }


def quantiles(values: Sequence[float] | np.ndarray) -> list[float] | None:
    """Return the quantiles of values at `SHARES`; None without values."""
    return None if len(values) == 0 else [round(float(value), 4) for value in np.quantile(values, SHARES)]


def count_split(reading: Reading, encoder: Encoder, input_size: int | None) -> tuple[dict[str, Any], Counts]:
    """Read a split and return its counts as plain data, with the time that this took, and the counts themselves."""
    start, counts = time.perf_counter(), Counts(encoder)
    for read in reading.reads:
        counts.add(read)
    sizes = {"rows": reading.rows, "images": reading.images}
    result = sizes | counts.result(input_size) | {"seconds": round(time.perf_counter() - start, 2)}
    return result, counts


def shared_images(counts: Counts, others: Iterable[bytes]) -> int:
    """Return the number of different images of a split whose content is among that of another split."""
    return len(counts.hashes.keys() & set(others))
