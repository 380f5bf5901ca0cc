"""Rows of streamed splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ...common.errors import UserError
from ..base.decode import decode_image, read_image
from ..base.faults import BadSample, Fault
from ..base.mixing import Mix
from ..text.captions import text_id, usable_caption
from .layout import PROBED_ROWS, Layout, Row, identity_number
from .remote import is_remote, read_url

TOKENIZER_ROWS = 100_000
"""Number of rows that a tokenizer is trained on, since a stream may be endless."""


class StreamedSource(Protocol):
    """A source in shards; reading can start at any row of a shard."""

    num_shards: int

    def count(self, shard: int) -> int | None:
        """Return the number of rows of a shard, or None if the number is unknown."""

    def rows(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a shard by column, starting at row `start`."""


class StreamedRow(NamedTuple):
    """One row with its image still encoded; its index is the shard's index times 2**32 plus the row in the shard."""

    row: Row
    sample_index: int
    name: str


class Stream:
    """Shards of one or several streamed sources.

    Args:
        parts: the opened sources, each with its layout.
        max_pixels: images with more pixels are refused.

    Raises:
        UserError: If a weight does not give whole shards.
    """

    def __init__(self, parts: Sequence[tuple[StreamedSource, Layout]], max_pixels: int) -> None:
        self.parts = list(parts)
        self.max_pixels = max_pixels
        self.shards = [(part, shard) for part, (source, _) in enumerate(parts) for shard in range(source.num_shards)]
        self.mix = Mix([source.num_shards for source, _ in parts], [layout.weight for _, layout in parts])
        for source, layout in parts:
            share = source.num_shards * layout.weight
            if abs(share - round(share)) > 1e-6:
                raise UserError(
                    f"Expected a weight of {layout.origin!r} that gives whole shards, of which it has "
                    f"{source.num_shards}, got {layout.weight}: choose another weight, or set data.streaming to false."
                )

    def shards_read(self) -> list[int]:
        """Return the number of shards that a pass reads of each source, by its weight."""
        return [round(source.num_shards * layout.weight) for source, layout in self.parts]

    def count(self, shard: int) -> int | None:
        """Return the number of rows of a shard, or None if the number is unknown."""
        part, number = self.shards[shard]
        return self.parts[part][0].count(number)

    def rows(self, shard: int, start: int = 0) -> Iterator[StreamedRow]:
        """Yield the rows of one shard in their order, starting at row `start`."""
        part, number = self.shards[shard]
        source, layout = self.parts[part]
        for place, values in enumerate(source.rows(number, start), start):
            index = shard << 32 | place
            name = self.image_name(index)
            yield StreamedRow(layout.row(values, name), index, name)

    def image_name(self, sample_index: int) -> str:
        """Return source, shard and row of an image; the path of the image is known only while the row is read."""
        part, shard = self.shards[sample_index >> 32]
        return f"{self.parts[part][1].origin}, shard {shard}, row {sample_index & 0xFFFFFFFF}"

    def all_rows(self) -> Iterator[StreamedRow]:
        """Yield all rows of all shards."""
        for shard in range(len(self.shards)):
            yield from self.rows(shard)

    def image_id(self, item: StreamedRow) -> int:
        """Return a number that is equal for rows of the same image."""
        identity = item.row.image_id
        if identity is not None:
            several = len(self.parts) > 1
            return identity_number(identity, self.shards[item.sample_index >> 32][0] if several else None)
        if item.row.data is None and item.row.path is not None:
            return text_id(item.row.path)
        return item.sample_index

    def layout_of(self, item: StreamedRow) -> Layout:
        """Return the layout of the source of a row."""
        return self.parts[self.shards[item.sample_index >> 32][0]][1]

    def decoder(self, item: StreamedRow) -> Callable[[], Any]:
        """Return a function that decodes the image of a row, or raises `BadSample`."""
        return lambda: decode_image(self.encoded(item), None, self._image_name_of(item), self.max_pixels)

    def encoded(self, item: StreamedRow) -> bytes:
        """Return the encoded image of a row; raises `BadSample`."""
        if item.row.fault is not None:
            raise BadSample(*item.row.fault)
        data, path, name = item.row.data, item.row.path, self._image_name_of(item)
        if data is None and path:
            layout = self.layout_of(item)
            layout.check_inside(path)
            if is_remote(path):
                return read_url(path, name, layout.retries)
        return read_image(data, path, name)

    @staticmethod
    def _image_name_of(item: StreamedRow) -> str:
        return item.row.path if item.row.data is None and item.row.path else item.name

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
        origins = ", ".join(repr(layout.origin) for _, layout in self.parts)
        tried, faults = 0, list[Fault]()
        for item in self.all_rows():
            if tried == PROBED_ROWS:
                break
            tried += 1
            if item.row.fault is not None:
                faults.append(item.row.fault)
                continue
            if need_captions and not any(usable_caption(text, clean, max_words) for text in item.row.captions):
                faults.append(Fault("empty caption", item.name))
                continue
            try:
                self.decoder(item)()
                return
            except BadSample as bad:
                faults.append(bad.fault)
        if not tried:
            raise UserError(f"Expected rows in the {split} split ({origins}), got none: check the path.")
        raise UserError(
            f"Expected images with captions in the {split} split ({origins}), got no usable row among the first "
            f"{tried} ('{faults[0].cause}' in {faults[0].name}): check data.image_root and the column names."
        )
