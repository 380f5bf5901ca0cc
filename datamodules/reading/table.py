"""Rows of memory-mapped sources, decoded on access."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from ..base.decode import decode_image
from ..base.faults import EMPTY_CAPTION, BadSample, reading
from ..base.mixing import Mix
from ..text.captions import text_id, usable_caption
from .layout import Ids, Layout, StoredImage, check_probes, is_binary_type, is_list_type, probed_rows, read_ids


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
        return {name: value for name, value in self.__dict__.items() if name != "_columns"}

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
                lengths = lengths if layout.rows is None else lengths[layout.rows]
                counts[start : start + len(lengths)] = np.maximum(lengths, 1)
        return counts

    def image_id(self, row: int) -> int:
        """Return a number that is equal for rows of the same image.

        The number is the id if the row has one, or else a hash of the path, or else the index of the row.

        Raises:
            BadSample: If the row has a fault, or has no id in the column that the user named.
        """
        source, position = self._locate(row)
        ids = self._numbers[source]
        if ids is None:
            return row if self._contains_images[source] else self._path_number(row, row)
        if (cause := ids.faults.get(position)) is not None:
            raise BadSample(cause, self.name(row))
        if position not in ids.absent:
            return int(ids.values[position])
        return self._path_number(row, text_id(f"row\0{row}"))  # the index of the row could be the id of another image

    def _path_number(self, row: int, otherwise: int) -> int:
        """Return a hash of the path of an image, or another number if the row contains the image."""
        image = self.stored_image(row)
        return text_id(image.path) if image.data is None and image.path is not None else otherwise

    @cached_property
    def _numbers(self) -> list[Ids | None]:
        """Ids of each source, None for a source without an id column."""
        several = len(self.layouts) > 1
        numbers: list[Ids | None] = []
        for source, (layout, identities) in enumerate(zip(self.layouts, self._identities, strict=True)):
            if identities is None:
                numbers.append(None)
                continue
            column = identities.with_format("arrow")[:][layout.image_id]
            if column.null_count == len(column) and layout.image_id == "image_id":
                numbers.append(None)  # records have the column also without ids
                continue
            fits = pa.types.is_integer(column.type) and not pa.types.is_uint64(column.type)
            if not several and fits and not column.null_count:
                numbers.append(Ids(column.to_numpy().astype(np.int64), {}, set()))
                continue
            numbers.append(read_ids(column, source if several else None, layout.needs_id))
        return numbers

    def images(self) -> list[list[int]]:
        """Return the rows of each image, in the order of the first rows; a row with a fault is a group of its own."""
        groups: dict[tuple[str, int], list[int]] = {}
        for row in range(len(self)):
            try:
                key = "image", self.image_id(row)
            except BadSample:
                key = "row", row
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def texts(self) -> Iterator[str]:
        """Yield all captions of rows without a fault."""
        for row in range(len(self)):
            with contextlib.suppress(BadSample):
                yield from self.captions(row)

    def check(self, split: str, need_captions: bool, clean: bool, max_words: int, need_images: bool = True) -> None:
        """Check that the split has rows, and that at least one of the probed rows can be used.

        Raises:
            UserError: If the split is empty, or no probed row can be used.
        """
        if len(self):
            _ = self._numbers

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
