"""Rows of vision-language tasks with a label, decoded on access."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from PIL import Image

from ...common.errors import UserError
from ..base.decode import decode_image
from ..base.faults import EMPTY_CAPTION, ROW_ERRORS, BadSample, unreadable
from ..labels.rows import LabelTable
from ..reading.blocks import first_keys
from ..reading.cache import cached_rows
from ..reading.layout import FAULT, IMAGE, Layout, Record, StoredImage, captions_in, record_batches
from ..reading.lists import checked_object
from ..reading.open import no_column, resolve_tables
from ..reading.parquet import column_names, read_table_items
from ..reading.remote import stamp_of
from ..reading.resolve import Named, as_source
from ..reading.table import texts_in
from ..text.captions import is_text, usable_caption

TEXT = "text"


@dataclass(frozen=True)
class Annotations:
    """The form of annotation files, and the settings that all sources of a datamodule share.

    Args:
        images: names of the images of a sample in batches, such as `("image_left", "image_right")`; also the columns
            of the rows.
        image_columns: key of each image in a file. A list `images` in a row replaces them.
        text_column: key of the text.
        values: key in a file of each further column of the rows, such as `{"label": "label"}`; a value is read as a
            list of strings.
        image_root: folder that relative image paths start from, and that no path may leave; by default the folder of
            the file.
        image_suffix: suffix of image names that have none.
        cache_dir: folder of the converted data; None for the default of the `datasets` library.
    """

    images: tuple[str, ...]
    image_columns: tuple[str, ...]
    text_column: str
    values: dict[str, str]
    image_root: str | None
    image_suffix: str = ""
    cache_dir: str | None = None

    def open(self, source: Named, split: str) -> tuple[Any, Layout]:
        """Open one source.

        Returns:
            A `datasets.Dataset` with the columns `images`, `TEXT`, `values` and `FAULT`, and
            the layout of its rows, whose caption column is the first of the values.

        Raises:
            UserError: If the source does not exist, is of another format, or lacks a column.
        """
        spec = as_source(source)
        _, files, folder = resolve_tables(spec, "images and texts")
        self._check_columns(files[0], spec.path, split)
        texts = pa.list_(pa.string())
        kinds = dict.fromkeys(self.images, IMAGE) | {TEXT: pa.string()} | dict.fromkeys(self.values, texts)
        schema = pa.schema(kinds | {FAULT: pa.string()})
        key = (self, files, [stamp_of(file) for file in files])

        def make() -> Iterator[pa.RecordBatch]:
            return record_batches(read_annotations(self, files), schema)

        dataset = cached_rows(make, schema, key, self.cache_dir, spec.path, split)
        named_root = spec.image_root or self.image_root
        layout = Layout(
            spec.path,
            self.images[0],
            next(iter(self.values), None),
            None,
            os.path.abspath(os.path.expanduser(named_root or folder)),
            fault=FAULT,
            confined=named_root is not None,
            weight=spec.weight,
        )
        return dataset, layout

    def _check_columns(self, file: str, origin: str, split: str) -> None:
        """Check the keys of a file's first row, before the file is read."""
        keys = column_names(file) if file.endswith(".parquet") else first_keys(file)
        needed = {self.text_column: "text_column"}
        if "images" not in keys:
            needed |= dict.fromkeys(self.image_columns, "image_columns")
        if split in ("train", "validation"):  # a test split may be without
            needed |= {key: f"{column}_column" for column, key in self.values.items() if column == "label"}
        for key, option in needed.items():
            if keys and key not in keys:
                raise UserError(no_column(key, keys, origin, option))


def read_annotations(form: Annotations, files: list[str]) -> Iterator[Record]:
    """Yield the rows of annotation files.

    Args:
        form: form of the files.
        files: `.json`, `.jsonl`, `.csv` or `.parquet` files.

    Raises:
        UserError: If a file has another form.
    """
    empty: Record = {name: {"bytes": None, "path": None} for name in form.images}
    empty |= {TEXT: "", **{column: [] for column in form.values}}
    for read in (read for file in files for read in read_table_items(file)):
        try:
            row = _row(form, read())
            texts = [row[TEXT], *(row[image]["path"] or "" for image in form.images)]
            if not all(map(is_text, [*texts, *(text for column in form.values for text in row[column])])):
                raise BadSample("lone surrogate", "")
            yield {**row, FAULT: None}
            continue
        except BadSample as bad:
            cause = bad.fault.cause
        except ROW_ERRORS as error:
            cause = unreadable(error, "").cause
        yield {**empty, FAULT: cause}


def _row(form: Annotations, item: Any) -> Record:
    values = checked_object(item)
    images = values.get("images")
    if not isinstance(images, list):
        images = [values.get(column) for column in form.image_columns]
    if len(images) != len(form.images):
        raise BadSample(f"{len(images)} images instead of {len(form.images)}", "")
    text = values.get(form.text_column)
    row: Record = {name: _image(image, form.image_suffix) for name, image in zip(form.images, images, strict=True)}
    row[TEXT] = "" if text is None else str(text)
    return row | {column: captions_in(values.get(key)) for column, key in form.values.items()}


def _image(value: Any, suffix: str) -> dict[str, Any]:
    """Return an encoded image or a path, as rows have them."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value), "path": None}
    if value is None or value == "":
        raise BadSample("no image", "")
    path = str(value)
    return {"bytes": None, "path": path if os.path.splitext(path)[1] else path + suffix}


class TaskTable(LabelTable):
    """Images with a text and a label, of one or several memory-mapped sources, concatenated."""

    def __init__(self, sources: Sequence[tuple[Any, Layout]], max_pixels: int, image_columns: Sequence[str]) -> None:
        super().__init__(sources, max_pixels)
        self.image_columns = tuple(image_columns)
        self._images = [dataset for dataset, _ in sources]  # with all columns
        self._texts = [None] * len(sources)

    def all_images(self, row: int) -> list[Image.Image]:
        """Return the decoded images of a row; raises `BadSample`."""
        images = []
        for data, path in self._encoded_images(row):
            if data is None:
                self._layout(row).check_inside(path)
            images.append(decode_image(data, path, path or self.name(row), self.max_pixels))
        return images

    def all_image_names(self, row: int) -> list[str]:
        """Return the absolute path of each image, or the name of the row if the data contains the image."""
        return [image.name(self.name(row)) for image in self._encoded_images(row)]

    def _encoded_images(self, row: int) -> list[StoredImage]:
        layout = self._layout(row)
        return [layout.encoded_image({layout.image: self._value(row, column)}) for column in self.image_columns]

    def text(self, row: int) -> str:
        """Return the raw text of a row; raises `BadSample`."""
        return str(self._value(row, TEXT))

    def texts(self) -> Iterator[str]:
        """Yield the texts of rows without a fault, to train a tokenizer on."""
        for source in range(len(self.layouts)):
            for values in self._readable(source, TEXT):
                yield from texts_in(values)

    def check_texts(self, split: str, clean: bool, max_words: int) -> None:
        """Check that the split has rows, and that at least one of the probed rows can be used.

        Raises:
            UserError: If the split is empty, or no probed row can be used.
        """

        def read(row: int) -> None:
            if not usable_caption(self.text(row), clean, max_words):
                raise BadSample(EMPTY_CAPTION, self.name(row))
            self.all_images(row)

        self.check_rows(split, "images with a text", "check data.image_root and the column names", read)
