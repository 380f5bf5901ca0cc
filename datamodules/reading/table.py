"""Rows of memory-mapped sources, decoded on access."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from ..base.decode import decode_image
from ..base.faults import EMPTY_CAPTION, ROW_ERRORS, BadSample, reading
from ..base.mixing import Mix
from ..text.captions import text_id, usable_caption
from .layout import (
    NO_ID,
    Layout,
    StoredImage,
    check_probes,
    identity_number,
    image_identity,
    is_binary_type,
    is_list_type,
    is_text_type,
    probed_rows,
)
from .remote import URL_START, is_remote

_READ_AT_ONCE = 10_000
"""Values of a column that are converted together."""
_ABSENT = -1
_LARGE_TEXT = pa.large_string()
"""Texts of any total size."""
SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
SPACES += "\u200a\u2028\u2029\u202f\u205f\u3000"
"""The characters that `str.strip` removes."""


class ImageTable:
    """Images of one or several memory-mapped sources, concatenated.

    Args:
        sources: the opened sources, each with its layout.
        max_pixels: images with more pixels are refused.
    """

    def __init__(self, sources: Sequence[tuple[Any, Layout]], max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.layouts = [layout for _, layout in sources]
        self._images = [
            dataset.select_columns([layout.image, *([layout.fault] if layout.fault is not None else [])])
            for dataset, layout in sources
        ]
        # Separate from the images, so that reading a caption does not copy the image.
        self._texts = [
            dataset.select_columns([layout.caption]) if layout.caption is not None else None
            for dataset, layout in sources
        ]
        self._starts = np.cumsum([0, *(layout.count(dataset) for dataset, layout in sources)]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def mix(self) -> Mix:
        """Number of rows and weight of each source."""
        return Mix(np.diff(self._starts).tolist(), [layout.weight for layout in self.layouts])

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the index of the source of a row, and the index of the row in the source."""
        source = bisect_right(self._starts, row) - 1
        position = row - self._starts[source]
        rows = self.layouts[source].rows
        return source, position if rows is None else int(rows[position])

    @cached_property
    def _columns(self) -> list[dict[str, pa.ChunkedArray]]:
        """Memory-mapped columns of each source; row access through the library takes ten times as long."""
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
        # For spawned workers: datasets are pickled as file names, these columns would be pickled with their content.
        return {name: value for name, value in self.__dict__.items() if name not in ("_columns", "_ids")}

    def image(self, row: int) -> Image.Image:
        """Return the decoded image.

        Raises:
            BadSample: If the image cannot be used.
        """
        image = self.stored_image(row)
        name = self.name(row)
        encoded = self._layout(row).read(image, name)
        return decode_image(encoded, None, image.name(name), self.max_pixels)

    def encoded(self, row: int) -> bytes:
        """Return the encoded image.

        Raises:
            BadSample: If the row has a fault, or the file cannot be read.
        """
        return self._layout(row).read(self.stored_image(row), self.name(row))

    def stored_image(self, row: int) -> StoredImage:
        """Return the encoded image, or the absolute path of its file; raises `BadSample`."""
        layout = self._layout(row)
        return layout.encoded_image({layout.image: self._value(row, layout.image)})

    def _layout(self, row: int) -> Layout:
        """Return the layout of the source of a row."""
        return self.layouts[self._locate(row)[0]]

    def _value(self, row: int, column: str) -> Any:
        """Return the value of a row in a column; all faults of single rows are raised in this method.

        Raises:
            BadSample: If the row has a fault, or its content cannot be read, such as text that is not UTF-8.
        """
        source, position = self._locate(row)
        columns = self._columns[source]
        fault = self.layouts[source].fault
        if fault is not None and (cause := columns[fault][position].as_py()) is not None:
            raise BadSample(cause, self.name(row))
        with reading(self.name(row)):
            return columns[column][position].as_py()

    def _readable(self, source: int, column: str, rows: np.ndarray | None = None) -> Iterator[pa.Array]:
        """Yield a column of a source, or some of its rows, in pieces, without rows that have a fault."""
        values = self._columns[source][column]
        fault = self.layouts[source].fault
        usable = None if fault is None else pc.is_null(self._columns[source][fault])
        if rows is not None:
            values = values.take(rows)
            usable = None if usable is None else usable.take(rows)
        if usable is not None and not pc.all(usable).as_py():
            values = values.filter(usable)
        for chunk in values.chunks:
            for start in range(0, len(chunk), _READ_AT_ONCE):
                yield chunk.slice(start, _READ_AT_ONCE)

    def name(self, row: int) -> str:
        """Return the source of a row and its index in the source, its name in messages."""
        source, position = self._locate(row)
        return f"{self.layouts[source].origin}, row {position}"

    def image_name(self, row: int) -> str:
        """Return the absolute path of an image file, or the name of the row if the data contains the image.

        Raises:
            BadSample: If the row has a fault.
        """
        name = self.name(row)
        return name if self._contains_images[self._locate(row)[0]] else self.stored_image(row).name(name)

    @cached_property
    def _contains_images(self) -> list[bool]:
        """Whether each source contains all of its images, determined without reading the images."""
        return [
            _contains_all_images(data, layout.image) for data, layout in zip(self._images, self.layouts, strict=True)
        ]

    def check_rows(self, split: str, expected: str, advice: str, read: Callable[[int], Any]) -> None:
        """Check evenly spaced rows by `check_probes`, whose arguments and errors these are; `read` reads a row."""
        probes = (partial(read, row) for row in (probed_rows(len(self)) if len(self) else ()))
        origins = [layout.origin for layout in self.layouts]
        check_probes(probes, expected, split, origins, f"{{}} of {len(self)}", advice)


class PairTable(ImageTable):
    """Rows of images and captions of one or several memory-mapped sources, concatenated."""

    def __init__(self, sources: Sequence[tuple[Any, Layout]], max_pixels: int) -> None:
        super().__init__(sources, max_pixels)
        self._identities = [
            dataset.select_columns([layout.image_id]) if layout.image_id is not None else None
            for dataset, layout in sources
        ]

    def captions(self, row: int) -> list[str]:
        """Return the raw captions of a row.

        Raises:
            BadSample: If the row has a fault.
        """
        layout = self._layout(row)
        if layout.caption is None:
            return []
        return layout.texts({layout.caption: self._value(row, layout.caption)})

    def caption_counts(self) -> np.ndarray:
        """Return the number of captions of each row, at least 1, so that a row without captions counts as unusable.

        Returns:
            int64 [N].
        """
        counts = np.ones(len(self), np.int64)
        for columns, layout, start in zip(self._columns, self.layouts, self._starts, strict=False):
            column = columns.get(layout.caption) if layout.caption is not None else None
            if column is not None and is_list_type(column.type):
                lengths = pc.list_value_length(column).fill_null(1).to_numpy()
                lengths = layout.selected(lengths)
                counts[start : start + len(lengths)] = np.maximum(lengths, 1)
        return counts

    def image_id(self, row: int) -> int:
        """Return a number that is equal for rows of the same image.

        The number is the id if the row has one, or else a hash of the path, or else the index of the row.

        Raises:
            BadSample: If the row has a fault, or has no id in the column that the user named.
        """
        source, position = self._locate(row)
        ids = self._ids[source]
        if ids is None:
            return row if self._contains_images[source] else self._path_number(row, row)
        name = self.name(row)
        with reading(name):
            identity = image_identity(ids[position].as_py(), name)
            if identity is not None:
                return identity_number(identity, source if len(self.layouts) > 1 else None)
        if self.layouts[source].needs_id:
            raise BadSample(NO_ID, name)
        return self._path_number(row, text_id(f"row\0{row}"))  # the index of the row could be the id of another image

    def _path_number(self, row: int, otherwise: int) -> int:
        """Return a hash of the path of an image, or another number if the row contains the image."""
        image = self.stored_image(row)
        return text_id(image.path) if image.data is None and image.path is not None else otherwise

    @cached_property
    def _ids(self) -> list[pa.ChunkedArray | None]:
        """Memory-mapped column of ids of each source, None for a source without ids."""
        columns: list[pa.ChunkedArray | None] = []
        for layout, identities in zip(self.layouts, self._identities, strict=True):
            column = None if identities is None else identities.with_format("arrow")[:][layout.image_id]
            # Records have the column also without ids.
            without = column is not None and layout.image_id == "image_id" and column.null_count == len(column)
            columns.append(None if without else column)
        return columns

    def images(self) -> list[list[int]]:
        """Return the rows of each image, in the order of the first rows; a row with a fault is a group of its own."""
        try:
            return positions_of(self._image_keys())
        except (*ROW_ERRORS, pa.ArrowException):  # such as text that is not UTF-8, which concerns one row only
            numbers: dict[tuple[str, int], int] = {}
            keys = [numbers.setdefault(self._image_key(row), row) for row in range(len(self))]
            return positions_of(np.array(keys, np.int64))

    def _image_key(self, row: int) -> tuple[str, int]:
        """Return the image id of a row, or the row if it has a fault, each with what it is."""
        try:
            return "image", self.image_id(row)
        except BadSample:
            return "row", row

    def _image_keys(self) -> np.ndarray:
        """Return numbers that are equal for rows of the same image, int64 [N].

        Raises:
            TypeError: If ids are of an unusual type.
            pyarrow.ArrowException: If a value cannot be read.
        """
        keys = -1 - np.arange(len(self))
        paths = []
        for source, (start, layout, ids) in enumerate(zip(self._starts, self.layouts, self._ids, strict=False)):
            path = paths_in(self._columns[source][layout.image], layout.root)
            if layout.fault is not None:
                path = _where(pc.is_null(self._columns[source][layout.fault]).combine_chunks(), path)
            path = layout.selected(path)
            if ids is not None:
                codes = layout.selected(id_codes(ids))
                keys[start : start + len(codes)][codes >= 0] = codes[codes >= 0] + keys.max(initial=-1) + 1
                path = _where(pa.array((codes == _ABSENT) & (not layout.needs_id)), path)
            paths.append(path)
        _, codes = codes_of(pa.chunked_array(paths, _LARGE_TEXT))
        return np.where(codes >= 0, codes + keys.max(initial=-1) + 1, keys)

    def texts(self) -> Iterator[str]:
        """Yield all captions of rows without a fault."""
        for source, layout in enumerate(self.layouts):
            if layout.caption is None:
                continue
            for values in self._readable(source, layout.caption, layout.rows):
                yield from texts_in(values)

    def check(self, split: str, need_captions: bool, clean: bool, max_words: int, need_images: bool = True) -> None:
        """Check that the split has rows, and that at least one of the probed rows can be used.

        Raises:
            UserError: If the split is empty, or no probed row can be used.
        """
        if len(self):
            _ = self._ids

        def read(row: int) -> None:
            captions = self.captions(row)
            if need_captions and not any(usable_caption(text, clean, max_words) for text in captions):
                raise BadSample(EMPTY_CAPTION, self.name(row))
            if need_images:
                self.image(row)

        self.check_rows(split, "images with captions", "check data.image_root and the column names", read)


def _contains_all_images(dataset: Any, column: str) -> bool:
    for table in dataset.with_format("arrow").iter(batch_size=10_000):
        images = table[column]
        if pa.types.is_struct(images.type):
            if images.type.get_field_index("bytes") < 0 or pc.struct_field(images, "bytes").null_count:
                return False
        elif not is_binary_type(images.type):
            return False
    return True


# Columns


def texts_in(values: pa.Array) -> list[str]:
    """Return the texts of a column of texts, or of lists of texts; rows that cannot be read have none."""
    try:
        flat = values.flatten() if is_list_type(values.type) else values
        texts: list[str] = flat.drop_null().to_numpy(zero_copy_only=False).tolist()
        return texts
    except (*ROW_ERRORS, pa.ArrowException):
        texts = []
        for value in values:
            with contextlib.suppress(*ROW_ERRORS):
                row = value.as_py()
                texts += [row] if isinstance(row, str) else [text for text in row or () if text is not None]
        return texts


def codes_of(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    """Return the different values of a column, and the index of each row's in them, `_ABSENT` for None, int64 [N].

    Raises:
        pyarrow.ArrowException: If a text is not UTF-8.
    """
    column.validate(full=True)
    encoded = column.combine_chunks().dictionary_encode()
    indices = encoded.indices.fill_null(_ABSENT).to_numpy(zero_copy_only=False).astype(np.int64)
    return encoded.dictionary, indices


def id_codes(column: pa.ChunkedArray) -> np.ndarray:
    """Return numbers from 0 that are equal for equal ids, `_ABSENT` for no id, less for an unusable one; int64 [N].

    Raises:
        TypeError: If the values are neither texts nor numbers.
        pyarrow.ArrowException: If a text is not UTF-8.
    """
    if is_text_type(column.type):
        texts = column.cast(_LARGE_TEXT)
        return codes_of(_where(pc.not_equal(pc.utf8_trim(texts, SPACES), ""), texts))[1]
    if pa.types.is_integer(column.type):
        return codes_of(column)[1]
    if pa.types.is_floating(column.type):
        values = column.to_numpy()
        codes = np.unique(values, return_inverse=True)[1]
        codes[~np.isfinite(values)] = _ABSENT - 1
        codes[column.is_null().to_numpy()] = _ABSENT
        return codes
    raise TypeError(f"ids of the type {column.type}")


def paths_in(images: pa.ChunkedArray, root: str) -> pa.Array:
    """Return the paths of image files as `layout.joined` does, None for an image that the data contains."""
    paths: Any = pa.chunked_array([pa.nulls(len(images), _LARGE_TEXT)])
    if is_text_type(images.type):
        paths = images.cast(_LARGE_TEXT)
    elif pa.types.is_struct(images.type) and images.type.get_field_index("path") >= 0:
        paths = pc.struct_field(images, "path").cast(_LARGE_TEXT)
        if images.type.get_field_index("bytes") >= 0:
            paths = _where(pc.struct_field(images, "bytes").is_null(), paths)
    whole = pc.match_substring_regex(paths, URL_START if is_remote(root) else "^/")
    before = f"{root.rstrip('/')}/" if is_remote(root) else os.path.join(root, "")
    below = pc.binary_join_element_wise(pa.scalar(before, _LARGE_TEXT), paths, pa.scalar("", _LARGE_TEXT))
    return pc.if_else(whole, paths, below).combine_chunks()


def _where(mask: Any, texts: Any) -> Any:
    """Return texts, None where the mask is false or None."""
    return pc.if_else(mask.fill_null(False), texts, pa.scalar(None, _LARGE_TEXT))


def positions_of(keys: np.ndarray) -> list[list[int]]:
    """Return the positions of equal keys, in the order of the first positions.

    Args:
        keys: int64 [N].
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(keys)])
    ends = np.append(starts[1:], len(keys))
    by_first = np.argsort(order[starts])
    positions = order.tolist()
    pairs = zip(starts[by_first].tolist(), ends[by_first].tolist(), strict=True)
    return [positions[start:end] for start, end in pairs]
