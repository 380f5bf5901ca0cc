"""Reading of a split's images and texts for the report: each image once, in loader workers or from a stream."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from ...datamodules.base.decode import content_hash, decode_image, decoding_by
from ...datamodules.base.faults import BadSample, Fault
from ...datamodules.base.loaders import inner_loader
from ...datamodules.pairs.rows import CaptionRows
from ...datamodules.reading.stream import Stream

STREAMED = 10_000
"""Rows of a stream that are read without a limit, since a stream may be endless."""
_TEXTS = ("captions", "question", "text")
"""Methods of rows that return their texts, or the only one."""


class Read(NamedTuple):
    """What was read of an image with its texts.

    Attributes:
        name: path of the image, or source and row.
        hashes: content hashes of its files, or of the pixels of what is no file.
        sizes: width and height of each image, upright.
        size: bytes of the files.
        texts: raw texts of all rows of the image.
        faults: why a text or the image cannot be used.
    """

    name: str
    hashes: list[bytes]
    sizes: list[tuple[int, int]]
    size: int
    texts: list[str]
    faults: list[Fault]


class Images(Dataset[Read]):
    """Images of a split in random access, with the texts of each group of rows."""

    def __init__(self, rows: Any, groups: Sequence[Sequence[int]], decoder: Any) -> None:
        self.rows = rows
        self.groups = groups
        self.decoder = decoder
        self.text_method = next(name for name in _TEXTS if hasattr(rows, name))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Read:
        group = self.groups[index]
        texts: list[str] = []
        faults: list[Fault] = []
        for row in group:
            try:
                content = getattr(self.rows, self.text_method)(row)
                texts += [content] if isinstance(content, str) else content
            except BadSample as bad:
                faults.append(bad.fault)
        try:
            with decoding_by(self.decoder):
                hashes, sizes, size = self._contents(group[0])
            return Read(self.rows.image_name(group[0]), hashes, sizes, size, texts, faults)
        except BadSample as bad:
            return Read(bad.fault.name, [], [], 0, texts, faults or [bad.fault])

    def _contents(self, row: int) -> tuple[list[bytes], list[tuple[int, int]], int]:
        if hasattr(self.rows, "all_images") or not hasattr(self.rows, "encoded"):  # several, or drawn
            images = self.rows.all_images(row) if hasattr(self.rows, "all_images") else [self.rows.image(row)]
            return [content_hash(image.tobytes()) for image in images], [image.size for image in images], 0
        data = self.rows.encoded(row)
        image = decode_image(data, None, self.rows.name(row), self.rows.max_pixels)
        return [content_hash(data)], [image.size], len(data)


class Reading(NamedTuple):
    """A split that is read.

    Attributes:
        rows: number of rows; None for a stream.
        images: number of images; None for a stream.
        reads: what is read, image by image.
    """

    rows: int | None
    images: int | None
    reads: Iterator[Read]


def read_split(rows: Any, limit: int | None, num_workers: int, decoder: Any) -> Reading:
    """Read the images of a split with their texts, each image once.

    Args:
        rows: rows that a datamodule has opened.
        limit: at most this many images, evenly spaced, or the first rows of a stream; None for all, and for
            `STREAMED` rows of a stream.
        num_workers: loader workers.
        decoder: as `SampledDataModule.decoder`.
    """
    if isinstance(rows, Stream):
        return Reading(None, None, _streamed(rows, STREAMED if limit is None else limit, decoder))
    table = rows.table if isinstance(rows, CaptionRows) else rows
    groups = table.images() if hasattr(table, "images") else [[row] for row in range(len(table))]
    chosen = groups
    if limit is not None and limit < len(groups):
        chosen = [groups[index] for index in np.linspace(0, len(groups) - 1, limit).astype(int).tolist()]
    loader = inner_loader(Images(table, chosen, decoder), list, num_workers, batch_size=32)  # type: ignore[arg-type]
    return Reading(len(rows), len(groups), itertools.chain.from_iterable(loader))


def _streamed(stream: Stream, limit: int, decoder: Any) -> Iterator[Read]:
    read: set[int] = set()
    for item in itertools.islice(stream.all_rows(), limit):
        row = item.row
        if row.fault is not None:
            yield Read(item.name, [], [], 0, [], [row.fault])
            continue
        identity = stream.image_id(item)
        if identity in read:
            yield Read(item.name, [], [], 0, row.captions, [])
            continue
        read.add(identity)
        try:
            data = stream.encoded(item)
            with decoding_by(decoder):
                image = decode_image(data, None, item.name, stream.max_pixels)
            yield Read(item.name, [content_hash(data)], [image.size], len(data), row.captions, [])
        except BadSample as bad:
            yield Read(item.name, [], [], 0, row.captions, [bad.fault])
