"""Counts of the images and texts of a split, and their lines in the report."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...datamodules.text.captions import ALL_WORDS, text_id
from ...datamodules.text.tokenizers import Encoder
from .reading import Read, Reading

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Shares of the quantiles."""
_QUANTILE_NAMES = ("least", "5%", "25%", "median", "75%", "95%", "most")
NAMED = 5
"""Number of duplicates, of frequent texts and of unreadable images that are named."""
_QUANTILES = {
    "width": "width, pixels",
    "height": "height, pixels",
    "aspect_ratio": "width / height",
    "texts_of_an_image": "texts of an image",
    "tokens": "tokens of a text",
}
_SHOWN = 60
"""Characters of a text or a name."""
_TEXTS_AT_ONCE = 1024


class Counts:
    """Counts of a split, updated image by image."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.images = 0
        self.bytes = 0
        self.texts = 0
        self.empty = 0
        self.cut_words = 0
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
        all_words = self.encoder.cleaned(text, ALL_WORDS).strip()
        cleaned = self.encoder.cleaned(text, self.encoder.max_words).strip()
        self.cut_words += all_words != cleaned
        key = text_id(cleaned)
        self.text_counts[key] += 1
        if self.text_counts[key] == 2:
            self.frequent[key] = cleaned
        self._waiting.append(text)
        if len(self._waiting) == _TEXTS_AT_ONCE:
            self._measure()

    def _measure(self) -> None:
        self.lengths += self.encoder.lengths(self._waiting)
        self._waiting = []

    def result(self, input_size: int | None) -> dict[str, Any]:
        """Return the counts as plain data; `input_size` is the shorter side of the model's images in pixels."""
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
    start = time.perf_counter()
    counts = Counts(encoder)
    for read in reading.reads:
        counts.add(read)
    sizes = {"rows": reading.rows, "images": reading.images}
    result = sizes | counts.result(input_size) | {"seconds": round(time.perf_counter() - start, 2)}
    return result, counts


def shared_images(counts: Counts, others: Iterable[bytes]) -> int:
    """Return the number of different images of a split whose content is among that of another split."""
    return len(counts.hashes.keys() & set(others))


def lines_of(split: str, counts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a split, whose counts may have `sources` and `also_in_train` beside those of `count_split`."""
    images = counts["images"]
    texts = counts["texts"]
    read = counts["images_read"]
    seconds = f"{counts['bytes'] / 2**20:,.1f} MiB in {counts['seconds']:.1f} s"
    share = "the first rows of a stream" if images is None else f"of {images:,}" if read < images else "all"
    yield f"{split}: {read:,} images ({share}) with {texts:,} texts; {seconds}"
    if counts["rows"] is not None and counts["rows"] != images:
        yield _line("rows", counts["rows"])
    for source in counts.get("sources", ()):
        yield _line(f"  of {_short(source['source'], 24)}", source["rows"], f"{source['epoch']:,} in an epoch")
    yield _line("duplicate images", counts["duplicate_images"], _share(counts["duplicate_images"], read))
    for one, other in counts["examples_of_duplicate_images"]:
        yield f"    {_short(other)} = {_short(one)}"
    if "also_in_train" in counts:
        yield _line("images that are in train too", counts["also_in_train"], _share(counts["also_in_train"], read))
    bad = sum(counts["unreadable"].values())
    yield _line("unreadable", bad, ", ".join(f"{cause}: {count:,}" for cause, count in counts["unreadable"].items()))
    for name in counts["examples_of_unreadable"]:
        yield f"    {_short(name)}"
    if counts["smaller_than_input"] is not None:
        note = f"{_share(counts['smaller_than_input'], read)}: enlarged to {counts['input_size']} pixels"
        yield _line("smaller than the model's images", counts["smaller_than_input"], note)
    yield _line("duplicate texts", counts["duplicate_texts"], _share(counts["duplicate_texts"], texts))
    for text, count in counts["most_frequent_texts"]:
        yield f"    {count:,} x {_short(text)!r}"
    yield _line("empty texts", counts["empty_texts"], _share(counts["empty_texts"], texts))
    long = counts["over_long_texts"]
    yield _line(f"texts over {counts['max_tokens']} tokens", long, f"{_share(long, texts)}: cut to max_tokens")
    if counts["texts_cut_to_max_words"]:
        cut = counts["texts_cut_to_max_words"]
        yield _line("texts of more than max_words", cut, f"{_share(cut, texts)}: cut by the cleaning")
    yield f"  {'':<28}" + "".join(f"{name:>9}" for name in _QUANTILE_NAMES)
    for key, name in _QUANTILES.items():
        if counts[key] is not None:
            yield f"  {name:<28}" + "".join(f"{value:>9,.4g}" for value in counts[key])
    yield ""


def _line(name: str, value: int, note: str = "") -> str:
    return f"  {name:<32}{value:>10,}  {note}".rstrip()


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else ""


def _short(text: str, length: int = _SHOWN) -> str:
    """Return a text of one line whose middle is left out if it is too long."""
    line = " ".join(text.split())
    half = length // 2
    return line if len(line) <= length else f"{line[: half - 1]}…{line[-half:]}"
