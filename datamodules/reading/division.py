"""One source in, splits out: rows of the training source for validation and test, without shared images or texts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

import lightning.pytorch as pl
import numpy as np

from ...common.errors import UserError
from ...common.ranges import SEED, CheckedArguments
from ..base.faults import ROW_ERRORS
from ..base.stages import Split
from .layout import Layout, StoredImage
from .remote import is_remote
from .resolve import Named

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def shares_of(text: str) -> dict[Split, float]:
    """Return the shares of the splits in a text such as `0.9/0.05/0.05`, without those of 0.

    Raises:
        UserError: If it is no such text, or the shares do not add up to 1.
    """
    try:
        numbers = [float(number) for number in text.split("/")]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 3 or not all(0 <= number <= 1 for number in numbers) or numbers[0] == 0:
        raise UserError(
            f"Expected shares of training, validation and test as data.split, such as 0.9/0.05/0.05 or 0.9/0.1, got "
            f"{text!r}: correct it."
        )
    if abs(sum(numbers) - 1) > 1e-6:
        raise UserError(f"Expected shares in data.split that add up to 1, got {text!r} ({sum(numbers):g}): correct it.")
    return {split: number for split, number in zip(SPLITS, numbers, strict=False) if number}


class Division:
    """Division of the rows of the training sources among splits.

    Rows of an equal image (its bytes, its path or its id) and, without labels, of an equal text are in one split,
    also where a chain of such rows connects them. With labels, the splits have each label in proportion, and training
    has each label. The division depends on the rows and the seed alone, and not on their order or the seed of the run.

    Args:
        shares: share of the rows in each split.
        seed: seed of the division.
        labels: whether the texts are labels, which rows share.
    """

    def __init__(self, shares: dict[Split, float], seed: int, labels: bool) -> None:
        self.shares = shares
        self.seed = seed
        self.labels = labels
        self._divided: list[np.ndarray] | None = None

    def rows(self, split: Split, opened: Sequence[tuple[Any, Layout]]) -> list[tuple[Any, Layout]]:
        """Return the sources of training, each with its rows in a split.

        Args:
            split: the split.
            opened: the opened sources of training, each with its layout, the same in each call.

        Raises:
            UserError: If there are fewer groups of rows than splits.
        """
        if self._divided is None:
            self._divided = self._divide(opened)
        number = list(self.shares).index(split)
        return [
            (data, dataclasses.replace(layout, rows=np.flatnonzero(part == number)))
            for (data, layout), part in zip(opened, self._divided, strict=True)
        ]

    def _divide(self, opened: Sequence[tuple[Any, Layout]]) -> list[np.ndarray]:
        """Return the number of the split of each row of each source, int64 [N]."""
        sources = [_Rows(data, layout, number) for number, (data, layout) in enumerate(opened)]
        images = [image for rows in sources for image in rows.images()]
        roots = [rows.layout.root for rows in sources for _ in range(len(rows.columns))]
        contents = _contents(images)
        names = [_from_root(content, root) for content, root in zip(contents, roots, strict=True)]
        groups = _Groups(len(images))
        labels: list[str] = []
        row = 0
        for rows in sources:
            for texts, identity in zip(rows.texts(), rows.identities(), strict=True):
                keys = [("image", contents[row]), ("id", identity)]
                keys += [] if self.labels else [("text", " ".join(text.split()).casefold()) for text in texts]
                groups.join(row, [key for key in keys if key[1] not in (None, "")])
                labels.append(texts[0] if self.labels and texts else "")
                row += 1
        members = groups.members()
        if len(members) < len(self.shares):
            raise UserError(
                f"Expected {len(self.shares)} or more groups of rows without a common image, id or text for "
                f"data.split, got {len(members)}: give the splits as files."
            )
        ranked = sorted(members, key=lambda rows: (labels[rows[0]], self._draw(rows, names)))
        divided = self._allot(ranked, labels, len(images))
        ends = np.cumsum([len(data) for data, _ in opened])
        return np.split(divided, ends[:-1])

    def _draw(self, rows: list[int], names: Sequence[str | None]) -> str:
        """Return a random text for a group, which depends on the seed and its images, and on no order."""
        first = min(names[row] or f"row {row}" for row in rows)
        return hashlib.sha256(f"{self.seed}\0{first}".encode()).hexdigest()

    def _allot(self, groups: Sequence[list[int]], labels: Sequence[str], count: int) -> np.ndarray:
        """Give each group to the split that lacks most rows, and the first of each label to training."""
        shares = np.array(list(self.shares.values()))
        counts = np.zeros(len(shares))
        done = 0
        divided = np.zeros(count, np.int64)
        before: str | None = None
        for group in groups:
            done += len(group)
            first = self.labels and labels[group[0]] != before
            before = labels[group[0]]
            split = 0 if first else int(np.argmax(shares * done - counts))
            counts[split] += len(group)
            divided[group] = split
        for empty in np.flatnonzero(counts == 0):  # of few groups, the smallest one of a split with several
            group_counts = Counter(int(divided[group[0]]) for group in groups)
            smallest = min((group for group in groups if group_counts[int(divided[group[0]])] > 1), key=len)
            divided[smallest] = empty
        return divided


class DividedSources(CheckedArguments, pl.LightningDataModule):
    """One training source that all splits are taken from; a base class before all others.

    Args:
        split: shares of the rows of `train` that train, validate and test, such as `0.9/0.05/0.05`, or `0.9/0.1`
            without a test. Rows of an equal image (bytes, path or id) and, but for labels, of an equal text are in one
            split; each label is in each split in proportion.
        split_seed: seed of this division, which is not that of the run: runs of several seeds have the same splits.
    """

    divides_labels: ClassVar[bool] = False
    """Whether the texts are labels."""

    def __init__(self, *, split: str | None = None, split_seed: Annotated[int, SEED] = 0, **options: Any) -> None:
        super().__init__(**options)
        self.division = None if split is None else Division(shares_of(split), split_seed, self.divides_labels)

    def divided(self, sources: dict[Split, list[Named]]) -> dict[Split, list[Named]]:
        """Return the sources of each split: with `split`, those of training for all of its splits.

        Raises:
            UserError: If there is no training source beside `split`, or another one.
        """
        if self.division is None:
            return sources
        if other := next((split for split in SPLITS[1:] if sources[split]), None):
            raise UserError(
                f"Expected data.train alone with data.split, got data.{other} too: leave out one of them; --data.split "
                "null switches off the division of a checkpoint."
            )
        if not sources["train"]:
            raise UserError("Expected data.train with data.split, got none: give the source that is divided.")
        return sources | dict.fromkeys(self.division.shares, sources["train"])


class _Rows:
    """Images, texts and ids of the rows of a source."""

    def __init__(self, data: Any, layout: Layout, number: int) -> None:
        names = [layout.image, layout.caption, layout.image_id]
        self.columns = data.select_columns([name for name in names if name is not None]).with_format("arrow")
        self.layout = layout
        self.number = number

    def _values(self, column: str | None) -> Iterator[Any]:
        """Yield the values of a column one by one; None for one that cannot be read."""
        if column is None:
            yield from [None] * len(self.columns)
            return
        for table in self.columns.select_columns([column]).iter(1000):
            for value in table[column]:
                try:
                    yield value.as_py()
                except ROW_ERRORS:
                    yield None

    def images(self) -> list[StoredImage | str]:
        """Return the hash of each image that a row contains, else its path."""
        images: list[StoredImage | str] = []
        for value in self._values(self.layout.image):
            image = StoredImage(None, None) if value is None else self.layout.encoded_image({self.layout.image: value})
            images.append(image if image.data is None else hashlib.sha256(image.data).hexdigest())
        return images

    def texts(self) -> Iterator[list[str]]:
        """Yield the texts of each row, or its label in a list."""
        for value in self._values(self.layout.caption):
            values = value if isinstance(value, list) else [value]
            yield [str(text) for text in values if text is not None]

    def identities(self) -> Iterator[Hashable]:
        """Yield what is equal for rows of one id; None for a row without one."""
        for value in self._values(self.layout.image_id):
            yield None if value in (None, "") else f"{self.number} {value}"


def _contents(images: Sequence[StoredImage | str]) -> list[str | None]:
    """Return what is equal for equal images: a hash of their bytes, or the path; None for no image.

    Files are read only where others have their size.
    """
    paths = [None if isinstance(image, str) or image.path is None else image.path for image in images]
    sizes = {path: _size(path) for path in dict.fromkeys(paths) if path is not None}
    often = Counter(size for size in sizes.values() if size is not None)
    hashes = {path: _hash(path) for path, size in sizes.items() if size is not None and often[size] > 1}
    return [
        image if isinstance(image, str) else None if path is None else hashes.get(path) or path
        for image, path in zip(images, paths, strict=True)
    ]


def _from_root(content: str | None, root: str) -> str | None:
    """Return a path from the root, so that a moved folder is divided as before; a hash or a URL unchanged."""
    return content if content is None or not os.path.isabs(content) else os.path.relpath(content, root)


def _size(path: str) -> int | None:
    try:
        return None if is_remote(path) else os.path.getsize(path)
    except (OSError, ValueError):
        return None


def _hash(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


class _Groups:
    """Rows that are joined by common keys (union-find)."""

    def __init__(self, count: int) -> None:
        self.parents = list(range(count))
        self.first: dict[tuple[str, Hashable], int] = {}

    def root(self, row: int) -> int:
        while self.parents[row] != row:
            self.parents[row] = self.parents[self.parents[row]]
            row = self.parents[row]
        return row

    def join(self, row: int, keys: Sequence[tuple[str, Hashable]]) -> None:
        """Join a row with all earlier rows of its keys."""
        for key in keys:
            other = self.root(self.first.setdefault(key, row))
            self.parents[self.root(row)] = other

    def members(self) -> list[list[int]]:
        """Return the rows of each group."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row in range(len(self.parents)):
            groups[self.root(row)].append(row)
        return list(groups.values())
