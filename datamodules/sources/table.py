"""Rows of opened sources: where image, captions and identity of each stand, decoded when asked for."""

from __future__ import annotations

import contextlib
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

from ..core.decode import EMPTY_CAPTION, BadSample, Fault, decode_image, read_image, reading
from ..text.tokenizers import text_id, usable_caption
from .records import FAULT, image_identity, whole_number

PROBED_ROWS = 64
NO_ID = "no image id"


class Row(NamedTuple):
    """One row, not decoded; why it cannot be used, where that is known already."""

    data: bytes | None
    path: str | None
    captions: list[str]
    image_id: int | str | None
    fault: Fault | None = None


@dataclass(frozen=True)
class Layout:
    """How to read a row of one source.

    Args:
        origin: the source as the user wrote it, for messages.
        image: image column.
        caption: column of the captions, or of the labels, None where there is none.
        image_id: image id column, None where there is none.
        root: folder that relative paths start from.
        classes: names of the labels 0, 1, ..., where the source has them.
        fault: column that says why a row cannot be used, None where there is none.
        confined: whether the root is one that no path may leave.
        needs_id: whether the user named the image id column, so that a row without an id cannot be used; otherwise
            its path stands for it.
    """

    origin: str
    image: str
    caption: str | None
    image_id: str | None
    root: str
    classes: tuple[str, ...] | None = None
    fault: str | None = None
    confined: bool = False
    needs_id: bool = False

    def encoded_image(self, values: dict[str, Any]) -> tuple[bytes | None, str | None]:
        """The encoded image, or its absolute path."""
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

    def row(self, values: dict[str, Any], name: str) -> Row:
        """All of it, or the fault that the row has.

        Args:
            values: by column; :data:`.records.FAULT` among them where the row could not be read.
            name: what messages call the row.
        """
        try:
            if (cause := values.get(FAULT)) is not None:
                raise BadSample(cause, name)
            with reading(name):
                identity = values[self.image_id] if self.image_id is not None else None
                known = known_identity(identity, name)
                if known is None and self.needs_id:
                    raise BadSample(NO_ID, name)
                return Row(*self.encoded_image(values), self.texts(values), known)
        except BadSample as bad:
            return Row(None, None, [], None, bad.fault)

    def check_inside(self, path: str | None) -> None:
        """Fail where a path leaves the root that it may not leave, by `..` or because it is absolute.

        Raises:
            BadSample: with the cause "outside image_root".
        """
        if self.confined and path is not None and not _is_inside(path, self.root):
            raise BadSample("outside image_root", path)


def _is_inside(path: str, root: str) -> bool:
    return os.path.normpath(path).startswith(os.path.join(root, ""))


def known_identity(value: Any, name: str) -> int | str | None:
    """An image's id as :func:`~.records.image_identity` has it; raises :class:`BadSample` with the row's name."""
    try:
        return image_identity(value)
    except BadSample as bad:
        raise BadSample(bad.fault.cause, name) from None


def identity_number(identity: int | str, source: int | None) -> int:
    """An image's id as a number: itself if it is one that 64 bits hold, else a 63-bit hash.

    Args:
        identity: the id in the data.
        source: number of the source, where several are read together whose ids have nothing to do with each other.
    """
    if source is not None:
        return text_id(f"{source}\0{_digits(identity)}")
    if not isinstance(identity, str):
        return int(identity) if -(2**63) <= identity < 2**63 else text_id(_digits(identity))
    number = whole_number(identity)
    return text_id(identity) if number is None or str(number) != identity else number


def _digits(identity: int | str) -> str:
    # Python refuses to write numbers of thousands of digits as decimals.
    return hex(identity) if isinstance(identity, int) and identity.bit_length() > 64 else str(identity)


class ImageTable:
    """Images of one or several memory-mapped sources, one after another.

    Args:
        parts: the sources, opened.
        max_pixels: larger images are refused.
    """

    def __init__(self, parts: Sequence[tuple[Any, Layout]], max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.layouts = [layout for _, layout in parts]
        self._images = [
            dataset.select_columns([layout.image, *([layout.fault] if layout.fault is not None else [])])
            for dataset, layout in parts
        ]
        # Apart, so that asking for a caption does not copy the image.
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
        """Images and captions of each source, memory-mapped; the library's own row access takes ten times as long."""
        return [
            {
                name: dataset.with_format("arrow")[:][name]
                for dataset in datasets
                if dataset is not None
                for name in dataset.column_names
            }
            for datasets in zip(self._images, self._texts, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # For a spawned worker: the data sets travel as the names of their files, these columns would as their content.
        return {name: value for name, value in self.__dict__.items() if name != "_columns"}

    def encoded(self, row: int) -> bytes:
        """The image's file; raises :class:`BadSample`."""
        return read_image(*self._readable(row))

    def _encoded(self, row: int) -> tuple[bytes | None, str | None]:
        """The encoded image, or its absolute path; raises :class:`BadSample`."""
        layout = self.layouts[self._locate(row)[0]]
        return layout.encoded_image({layout.image: self._value(row, layout.image)})

    def _readable(self, row: int) -> tuple[bytes | None, str | None, str]:
        """The same for reading, and what messages call it; raises :class:`BadSample`."""
        data, path = self._encoded(row)
        if data is not None or not path:
            return data, None, self.name(row)
        self.layouts[self._locate(row)[0]].check_inside(path)
        return None, path, path

    def _value(self, row: int, column: str) -> Any:
        """What stands in a row: the one place where a table meets what is wrong with a single one.

        Raises:
            BadSample: the row has a fault, or its content cannot be read, such as text that is not UTF-8.
        """
        part, local = self._locate(row)
        columns, fault = self._columns[part], self.layouts[part].fault
        if fault is not None and (cause := columns[fault][local].as_py()) is not None:
            raise BadSample(cause, self.name(row))
        with reading(self.name(row)):
            return columns[column][local].as_py()

    def image(self, row: int) -> Image.Image:
        """The decoded image.

        Raises:
            BadSample: it cannot be used.
        """
        return decode_image(*self._readable(row), self.max_pixels)

    def name(self, row: int) -> str:
        """Source and number of a row in it."""
        part, local = self._locate(row)
        return f"{self.layouts[part].origin}, row {local}"

    def picture_name(self, row: int) -> str:
        """The absolute path of the image where it is a file, else source and number of the row.

        Raises:
            BadSample: the row has a fault.
        """
        if self._embedded[self._locate(row)[0]]:
            return self.name(row)
        data, path = self._encoded(row)
        return path if data is None and path else self.name(row)

    @cached_property
    def _embedded(self) -> list[bool]:
        """Whether each source holds all images itself, told without reading them."""
        return [_all_embedded(data, layout.image) for data, layout in zip(self._images, self.layouts, strict=True)]

    def unusable(self, row: int) -> Fault | None:
        """What is wrong with a row, or None."""
        try:
            self.image(row)
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


class PairTable(ImageTable):
    """Rows of images and captions of one or several memory-mapped sources, one after another.

    Args:
        parts: the sources, opened.
        max_pixels: larger images are refused.
    """

    def __init__(self, parts: Sequence[tuple[Any, Layout]], max_pixels: int) -> None:
        super().__init__(parts, max_pixels)
        self._identities = [
            dataset.select_columns([layout.image_id]) if layout.image_id is not None else None
            for dataset, layout in parts
        ]

    def captions(self, row: int) -> list[str]:
        """The raw captions of a row; raises :class:`BadSample`."""
        layout = self.layouts[self._locate(row)[0]]
        if layout.caption is None:
            return []
        return layout.texts({layout.caption: self._value(row, layout.caption)})

    def image_id(self, row: int) -> int:
        """Equal for rows that show one image: the id column, else the path, else the row itself.

        Raises:
            BadSample: the row has a fault, or no id in the column that the user has named.
        """
        part, local = self._locate(row)
        ids = self._numbers[part]
        if ids is not None:
            if (cause := ids.faults.get(local)) is not None:
                raise BadSample(cause, self.name(row))
            if local not in ids.absent:
                return int(ids.values[local])
            data, path = self._encoded(row)
            # Not the row's number, which can be another image's id.
            return text_id(path if data is None and path is not None else f"row\0{row}")
        if self._embedded[part]:
            return row
        data, path = self._encoded(row)
        return text_id(path) if data is None and path is not None else row

    @cached_property
    def _numbers(self) -> list[_Ids | None]:
        """The id column of each source, None where it has none."""
        several = len(self.layouts) > 1
        numbers: list[_Ids | None] = []
        for part, (layout, identities) in enumerate(zip(self.layouts, self._identities, strict=True)):
            if identities is None:
                numbers.append(None)
                continue
            column = identities.with_format("arrow")[:][layout.image_id]
            if column.null_count == len(column) and layout.image_id == "image_id":
                numbers.append(None)  # the uniform records always have the column
                continue
            fits = pa.types.is_integer(column.type) and not pa.types.is_uint64(column.type)
            if not several and fits and not column.null_count:
                numbers.append(_Ids(column.to_numpy().astype(np.int64), {}, set()))
                continue
            numbers.append(_ids(column, part if several else None, layout.needs_id))
        return numbers

    def images(self) -> list[list[int]]:
        """The rows of each image, in the order in which the images first come up; a row with a fault is alone."""
        groups: dict[tuple[str, int], list[int]] = {}
        for row in range(len(self)):
            try:
                key = "image", self.image_id(row)
            except BadSample:
                key = "row", row
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def texts(self) -> Iterator[str]:
        """All captions of rows without a fault."""
        for row in range(len(self)):
            with contextlib.suppress(BadSample):
                yield from self.captions(row)

    def check(self, split: str, need_captions: bool, clean: bool, max_words: int) -> None:
        """Fail where the split is empty, or where nothing in it can be used.

        Raises:
            ValueError: naming what was found.
        """
        if len(self):
            _ = self._numbers

        def unusable(row: int) -> Fault | None:
            try:
                captions = self.captions(row)
            except BadSample as bad:
                return bad.fault
            if need_captions and not any(usable_caption(text, clean, max_words) for text in captions):
                return Fault(EMPTY_CAPTION, self.name(row))
            return self.unusable(row)

        self.check_rows(split, "images with captions: check data.image_root and the column names", unusable)


class _Ids(NamedTuple):
    """The ids of a source's images as numbers; the causes of the rows that have none; those that may have none."""

    values: np.ndarray  # int64 [N]
    faults: dict[int, str]
    absent: set[int]


def _ids(column: pa.ChunkedArray, source: int | None, needed: bool) -> _Ids:
    values, faults, absent = np.zeros(len(column), np.int64), dict[int, str](), set[int]()
    for row, value in enumerate(column):
        try:
            with reading(""):
                known = known_identity(value.as_py(), "")
                if known is not None:
                    values[row] = identity_number(known, source)
                elif needed:
                    raise BadSample(NO_ID, "")
                else:
                    absent.add(row)
        except BadSample as bad:
            faults[row] = bad.fault.cause
    return _Ids(values, faults, absent)


def _all_embedded(dataset: Any, column: str) -> bool:
    for table in dataset.with_format("arrow").iter(batch_size=10_000):
        images = table[column]
        if pa.types.is_struct(images.type):
            if images.type.get_field_index("bytes") < 0 or pc.struct_field(images, "bytes").null_count:
                return False
        elif not pa.types.is_binary(images.type) and not pa.types.is_large_binary(images.type):
            return False
    return True
