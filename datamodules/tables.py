"""Rows of opened sources: where picture, captions and identity of each stand, decoded when asked for."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from .decode import EMPTY_CAPTION, BadSample, Fault, decode_image, read_picture
from .text import text_id, usable_caption

PROBED_ROWS = 64


class Row(NamedTuple):
    """One row, not decoded."""

    data: bytes | None
    path: str | None
    captions: list[str]
    image_id: int | str | None


@dataclass(frozen=True)
class Layout:
    """How to read a row of one source.

    Args:
        origin: the source as the user wrote it, for messages.
        image: picture column.
        caption: column of the captions, or of the labels, None where there is none.
        image_id: picture id column, None where there is none.
        root: folder that relative paths start from.
        classes: names of the labels 0, 1, ..., where the source has them.
    """

    origin: str
    image: str
    caption: str | None
    image_id: str | None
    root: str
    classes: tuple[str, ...] | None = None

    def picture(self, values: dict[str, Any]) -> tuple[bytes | None, str | None]:
        """The encoded picture, or its absolute path."""
        image = values[self.image]
        data, path = None, None
        if isinstance(image, str):
            path = image
        elif isinstance(image, (bytes, bytearray)):
            data = bytes(image)
        elif isinstance(image, dict):
            data, path = image.get("bytes"), image.get("path")
        if data is None and path is not None:
            path = os.path.join(self.root, path)
        return data, path

    def texts(self, values: dict[str, Any]) -> list[str]:
        """The captions."""
        caption = values[self.caption] if self.caption is not None else None
        if caption is None:
            return []
        return [caption] if isinstance(caption, str) else [text for text in caption if text is not None]

    def row(self, values: dict[str, Any]) -> Row:
        """All of it."""
        identity = values[self.image_id] if self.image_id is not None else None
        return Row(*self.picture(values), self.texts(values), identity)


def identity_number(identity: int | str, source: int | None) -> int:
    """A picture's id as a number: itself if it is one, else a 63-bit hash.

    Args:
        identity: the id in the data.
        source: number of the source, where several are read together whose ids have nothing to do with each other.
    """
    if source is None:
        if not isinstance(identity, str):
            return int(identity)
        if (
            identity.isascii()
            and identity.lstrip("-").isdigit()
            and str(int(identity)) == identity
            and len(identity) < 19
        ):
            return int(identity)
        return text_id(identity)
    return text_id(f"{source}\0{identity}")


class PictureTable:
    """Pictures of one or several memory-mapped sources, one after another.

    Args:
        parts: the sources, opened.
        max_pixels: larger pictures are refused.
    """

    def __init__(self, parts: Sequence[tuple[Any, Layout]], max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.layouts = [layout for _, layout in parts]
        self._pictures = [dataset.select_columns([layout.image]) for dataset, layout in parts]
        # Apart, so that asking for a caption does not copy the picture.
        self._texts = [
            dataset.select_columns([layout.caption]) if layout.caption is not None else None
            for dataset, layout in parts
        ]
        self._starts = np.cumsum([0, *(len(dataset) for dataset, _ in parts)]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def _locate(self, row: int) -> tuple[int, int]:
        part = bisect_right(self._starts, row) - 1
        return part, row - self._starts[part]

    @cached_property
    def _columns(self) -> list[dict[str, pa.ChunkedArray]]:
        """Pictures and captions of each source, memory-mapped; the library's own row access takes ten times as long."""
        return [
            {
                name: dataset.with_format("arrow")[:][name]
                for dataset in datasets
                if dataset is not None
                for name in dataset.column_names
            }
            for datasets in zip(self._pictures, self._texts, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # For a spawned worker: the data sets travel as the names of their files, these columns would as their content.
        return {name: value for name, value in self.__dict__.items() if name != "_columns"}

    def encoded(self, row: int) -> bytes:
        """The picture's file; raises :class:`BadSample`."""
        data, path = self._encoded(row)
        return read_picture(data, path, path if data is None and path else self.name(row))

    def _encoded(self, row: int) -> tuple[bytes | None, str | None]:
        part, local = self._locate(row)
        layout = self.layouts[part]
        return layout.picture({layout.image: self._columns[part][layout.image][local].as_py()})

    def picture(self, row: int) -> Image.Image:
        """The decoded picture.

        Raises:
            BadSample: it cannot be used.
        """
        data, path = self._encoded(row)
        return decode_image(data, path, path if data is None and path else self.name(row), self.max_pixels)

    def name(self, row: int) -> str:
        """Source and number of a row in it."""
        part, local = self._locate(row)
        return f"{self.layouts[part].origin}, row {local}"

    def picture_name(self, row: int) -> str:
        """The absolute path of the picture where it is a file, else source and number of the row."""
        if self._embedded[self._locate(row)[0]]:
            return self.name(row)
        data, path = self._encoded(row)
        return path if data is None and path else self.name(row)

    @cached_property
    def _embedded(self) -> list[bool]:
        """Whether each source holds all pictures itself, told without reading them."""
        return [_all_embedded(data, layout.image) for data, layout in zip(self._pictures, self.layouts, strict=True)]

    def unusable(self, row: int) -> Fault | None:
        """What is wrong with a row, or None."""
        try:
            self.picture(row)
        except BadSample as bad:
            return bad.fault
        return None

    def check_rows(self, split: str, wanted: str, unusable: Callable[[int], Fault | None]) -> None:
        """Fail where the split is empty, or where nothing in it can be used.

        Args:
            split: name of the split, for the message.
            wanted: what a row should be, and what to look at otherwise, for the message.
            unusable: what is wrong with a row.

        Raises:
            ValueError: naming what was found.
        """
        origins = ", ".join(repr(layout.origin) for layout in self.layouts)
        if not len(self):
            raise ValueError(f"found no rows in the {split} split ({origins}), expected some: check the path")
        causes: dict[str, int] = {}
        example = ""
        rows = np.unique(np.linspace(0, len(self) - 1, PROBED_ROWS).astype(int)).tolist()
        for row in rows:
            fault = unusable(row)
            if fault is None:
                return
            causes[fault.cause] = causes.get(fault.cause, 0) + 1
            example = fault.name if fault.cause != EMPTY_CAPTION else example
        what = ", ".join(f"{cause}: {count}" for cause, count in causes.items())
        hint = f", for example {example}" if example else ""
        raise ValueError(
            f"found no usable row among {len(rows)} of the {len(self)} in the {split} split ({origins}; {what}{hint}), "
            f"expected {wanted}"
        )


class PairTable(PictureTable):
    """Rows of pictures and captions of one or several memory-mapped sources, one after another.

    Args:
        parts: the sources, opened.
        max_pixels: larger pictures are refused.
    """

    def __init__(self, parts: Sequence[tuple[Any, Layout]], max_pixels: int) -> None:
        super().__init__(parts, max_pixels)
        self._identities = [
            dataset.select_columns([layout.image_id]) if layout.image_id is not None else None
            for dataset, layout in parts
        ]

    def captions(self, row: int) -> list[str]:
        """The raw captions of a row."""
        part, local = self._locate(row)
        layout = self.layouts[part]
        if layout.caption is None:
            return []
        return layout.texts({layout.caption: self._columns[part][layout.caption][local].as_py()})

    def image_id(self, row: int) -> int:
        """Equal for rows that show one picture: the id column, else the path, else the row itself."""
        part, local = self._locate(row)
        ids = self._numbers[part]
        if ids is not None:
            return int(ids[local])
        if self._embedded[part]:
            return row
        data, path = self._encoded(row)
        return text_id(path) if data is None and path is not None else row

    @cached_property
    def _numbers(self) -> list[np.ndarray | None]:
        """The id column of each source as int64, None where it has none."""
        several = len(self.layouts) > 1
        numbers: list[np.ndarray | None] = []
        for part, (layout, identities) in enumerate(zip(self.layouts, self._identities, strict=True)):
            if identities is None:
                numbers.append(None)
                continue
            column = identities.with_format("arrow")[:][layout.image_id]
            if column.null_count == len(column) and layout.image_id == "image_id":
                numbers.append(None)  # the uniform records always have the column
                continue
            if column.null_count:
                missing = column.is_null().to_pylist().index(True)
                raise ValueError(
                    f"found no {layout.image_id!r} in row {missing} of {layout.origin!r}, expected one in each row: "
                    "fill the column, or name none in data.image_id_column"
                )
            if not several and pa.types.is_integer(column.type):
                numbers.append(column.to_numpy().astype(np.int64))
                continue
            source = part if several else None
            numbers.append(np.array([identity_number(value, source) for value in column.to_pylist()], dtype=np.int64))
        return numbers

    def pictures(self) -> list[list[int]]:
        """The rows of each picture, in the order in which the pictures first come up."""
        groups: dict[int, list[int]] = {}
        for row in range(len(self)):
            groups.setdefault(self.image_id(row), []).append(row)
        return list(groups.values())

    def texts(self) -> Iterator[str]:
        """All captions."""
        for layout, texts in zip(self.layouts, self._texts, strict=True):
            if texts is not None:
                for batch in texts.iter(1000):
                    for caption in batch[str(layout.caption)]:
                        yield from layout.texts({str(layout.caption): caption})

    def check(self, split: str, need_captions: bool, clean: bool, max_words: int) -> None:
        """Fail where the split is empty, or where nothing in it can be used.

        Raises:
            ValueError: naming what was found.
        """
        if len(self):
            _ = self._numbers

        def unusable(row: int) -> Fault | None:
            if need_captions and not any(usable_caption(text, clean, max_words) for text in self.captions(row)):
                return Fault(EMPTY_CAPTION, self.name(row))
            return self.unusable(row)

        self.check_rows(split, "pictures with captions: check data.image_root and the column names", unusable)


def _all_embedded(dataset: Any, column: str) -> bool:
    for table in dataset.with_format("arrow").iter(batch_size=10_000):
        pictures = table[column]
        if pa.types.is_struct(pictures.type):
            if pc.struct_field(pictures, "bytes").null_count:
                return False
        elif not pa.types.is_binary(pictures.type) and not pa.types.is_large_binary(pictures.type):
            return False
    return True
