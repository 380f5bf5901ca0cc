"""Rows of streamed splits, and the sources that the `datasets` library streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from PIL import Image

from ...common.errors import UserError
from ..base.decode import decode_image
from ..base.faults import EMPTY_CAPTION, BadSample
from ..base.mixing import Mix
from ..text.captions import text_id, usable_caption
from .layout import PROBED_ROWS, Layout, Row, check_probes, identity_number
from .remote import is_remote

READ_AT_ONCE = 64
"""Number of rows that are read together from a file."""
TOKENIZER_ROWS = 100_000
"""Number of rows that a tokenizer is trained on, since a stream may be endless."""


class StreamedSource(Protocol):
    """A source in shards; reading can start at any row of a shard."""

    num_shards: int

    def count(self, shard: int) -> int:
        """Return the number of rows of a shard, which may have to be read for it once."""

    def chunk_starts(self, shard: int) -> np.ndarray | None:
        """Return the rows at which a shard may be cut, int64 [n], the first of them 0; None if it may be anywhere."""

    def is_sequential(self, shard: int) -> bool:
        """Return whether a shard can only be read from its start on, so that earlier rows are read as well."""

    def is_remote(self) -> bool:
        """Return whether each read waits for the network."""

    def rows(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a shard by column, from row `start` to row `stop`."""


class CountedByReading:
    """Part of a source whose shards are read to be counted, and from their start on."""

    _counts: dict[int, int]

    def count(self, shard: int) -> int:
        """Return the number of rows of a shard, which is read for it once."""
        if shard not in self._counts:
            self._counts[shard] = self.count_rows(shard)
        return self._counts[shard]

    def count_rows(self, shard: int) -> int:
        """Read a shard, and return the number of its rows."""
        raise NotImplementedError

    def chunk_starts(self, shard: int) -> None:
        """Return None, since a shard may be cut anywhere."""
        return

    def is_sequential(self, shard: int) -> bool:
        """Return True."""
        return True


class LibrarySource(CountedByReading):
    """Streamed source that the `datasets` library reads (the hub)."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.num_shards: int = data.num_shards
        self._counts = {}

    def is_remote(self) -> bool:
        """Return True."""
        return True

    def rows(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a shard by column, from row `start` to row `stop`."""
        return itertools.islice(self._rows(shard), start, stop)

    def count_rows(self, shard: int) -> int:
        """Read a shard, and return the number of its rows."""
        return sum(1 for _ in self._rows(shard))

    def _rows(self, shard: int) -> Iterator[dict[str, Any]]:
        data = self.data.shard(num_shards=self.num_shards, index=shard)
        # Not iteration over rows, which would divide the shard among the loader workers again.
        for columns in data.iter(batch_size=READ_AT_ONCE):
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


class BatchSource(CountedByReading):
    """Streamed files without an index (JSON, CSV, folders), of which earlier rows are read, but not converted.

    Args:
        files: the files, each a shard.
        read: function that yields the rows of files in batches.
    """

    def __init__(self, files: Sequence[str], read: Callable[[list[str]], Iterator[pa.RecordBatch]]) -> None:
        self.files = list(files)
        self.read = read
        self.num_shards = len(self.files)
        self._counts = {}

    def is_remote(self) -> bool:
        """Return whether the files are read by URL."""
        return any(is_remote(file) for file in self.files)

    def count_rows(self, shard: int) -> int:
        """Read a file, and return the number of its rows."""
        return sum(batch.num_rows for batch in self.read([self.files[shard]]))

    def rows(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a shard by column, from row `start` to row `stop`."""
        return itertools.islice(self._rows(shard, start), None if stop is None else max(stop - start, 0))

    def _rows(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
        for batch in self.read([self.files[shard]]):
            for position in range(start, batch.num_rows, READ_AT_ONCE):
                yield from batch.slice(position, READ_AT_ONCE).to_pylist()
            start = max(start - batch.num_rows, 0)


class StreamedRow(NamedTuple):
    """One row with its image still encoded; its index is the shard's index times 2**32 plus the row in the shard."""

    row: Row
    sample_index: int
    name: str


class Stream:
    """Shards of one or several streamed sources.

    Raises:
        UserError: If a weight does not give whole shards.
    """

    def __init__(self, sources: Sequence[tuple[StreamedSource, Layout]], max_pixels: int) -> None:
        self.sources = list(sources)
        self.max_pixels = max_pixels
        self.shards = [
            (index, shard) for index, (source, _) in enumerate(sources) for shard in range(source.num_shards)
        ]
        self.mix = Mix([source.num_shards for source, _ in sources], [layout.weight for _, layout in sources])
        for source, layout in sources:
            share = source.num_shards * layout.weight
            if abs(share - round(share)) > 1e-6:
                raise UserError(
                    f"Expected a weight of {layout.origin!r} that gives whole shards, of which it has "
                    f"{source.num_shards}, got {layout.weight}: choose another weight, or set data.streaming to false."
                )

    def shards_read(self) -> list[int]:
        """Return the number of shards that a pass reads of each source, by its weight."""
        return [round(source.num_shards * layout.weight) for source, layout in self.sources]

    def count(self, shard: int) -> int:
        """Return the number of rows of a shard, which may have to be read for it once."""
        source, number = self._of(shard)
        return source.count(number)

    def chunk_starts(self, shard: int) -> np.ndarray | None:
        """Return the rows at which a shard may be cut, int64 [n], the first of them 0; None if it may be anywhere."""
        source, number = self._of(shard)
        return source.chunk_starts(number)

    def is_sequential(self, shard: int) -> bool:
        """Return whether a shard can only be read from its start on."""
        source, number = self._of(shard)
        return source.is_sequential(number)

    def is_remote(self) -> bool:
        """Return whether reads of a source wait for the network."""
        return any(source.is_remote() for source, _ in self.sources)

    def _of(self, shard: int) -> tuple[StreamedSource, int]:
        index, number = self.shards[shard]
        return self.sources[index][0], number

    def row(self, shard: int, row: int) -> StreamedRow:
        """Return one row of a shard."""
        return next(self.rows(shard, row, row + 1))

    def rows(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[StreamedRow]:
        """Yield the rows of one shard in their order, from row `start` to row `stop`."""
        index, number = self.shards[shard]
        source, layout = self.sources[index]
        for row, values in enumerate(source.rows(number, start, stop), start):
            sample_index = shard << 32 | row
            name = self.image_name(sample_index)
            yield StreamedRow(layout.row(values, name), sample_index, name)

    def image_name(self, sample_index: int) -> str:
        """Return source, shard and row of an image; the path of the image is known only while the row is read."""
        index, shard = self.shards[sample_index >> 32]
        return f"{self.sources[index][1].origin}, shard {shard}, row {sample_index & 0xFFFFFFFF}"

    def all_rows(self) -> Iterator[StreamedRow]:
        """Yield all rows of all shards."""
        for shard in range(len(self.shards)):
            yield from self.rows(shard)

    def image_id(self, item: StreamedRow) -> int:
        """Return a number that is equal for rows of the same image."""
        image, _, identity, _ = item.row
        if identity is not None:
            index, _ = self.shards[item.sample_index >> 32]
            return identity_number(identity, index if len(self.sources) > 1 else None)
        return text_id(image.path) if image.data is None and image.path is not None else item.sample_index

    def decoder(self, item: StreamedRow) -> Callable[[], Image.Image]:
        """Return a function that decodes the image of a row, or raises `BadSample`."""
        return lambda: decode_image(self.encoded(item), None, item.row.image.name(item.name), self.max_pixels)

    def encoded(self, item: StreamedRow) -> bytes:
        """Return the encoded image of a row; raises `BadSample`."""
        if item.row.fault is not None:
            raise BadSample(*item.row.fault)
        index, _ = self.shards[item.sample_index >> 32]
        _, layout = self.sources[index]
        return layout.read(item.row.image, item.name)

    def texts(self) -> Iterator[str]:
        """Yield the captions of the first `TOKENIZER_ROWS` rows, to train a tokenizer on."""
        for number, item in enumerate(self.all_rows()):
            if number == TOKENIZER_ROWS:
                return
            yield from item.row.captions

    def check(self, split: str, need_captions: bool, clean: bool, max_words: int) -> None:
        """Check that the split has rows, and that at least one of the first rows can be used.

        Raises:
            UserError: If the split is empty, or none of the first rows can be used.
        """

        def read(item: StreamedRow) -> None:
            usable = any(usable_caption(text, clean, max_words) for text in item.row.captions)
            if item.row.fault is None and need_captions and not usable:
                raise BadSample(EMPTY_CAPTION, item.name)
            self.decoder(item)()

        probes = (partial(read, item) for item in itertools.islice(self.all_rows(), PROBED_ROWS))
        origins = [layout.origin for _, layout in self.sources]
        advice = "check data.image_root and the column names"
        check_probes(probes, "images with captions", split, origins, "the first {}", advice)
