"""Opening of sources: Parquet, JSON, CSV, image folders, WebDataset shards, hub names."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from ...common.errors import UserError
from ...common.hub import hub_or_cache, reason_not_found
from ...common.names import nearest, nearest_path
from ...common.urls import keep
from ..base.faults import BadSample
from ..base.memory import MemoryRows, plain_value, stored_image
from ..base.stages import Split
from .blocks import first_keys, read_list_batches
from .cache import cached_rows, index_cache, uncollected
from .division import Division
from .layout import (
    FAULT,
    RECORD,
    Layout,
    Record,
    captions_in,
    identity_in,
    is_binary_type,
    is_text_type,
    record,
    record_batches,
)
from .lists import read_class_folders, read_folder
from .parquet import ParquetSource, parquet_schema, read_parquets
from .published import class_names, is_karpathy, list_of_split, read_authors_list, read_karpathy
from .remote import RETRIES, is_remote, retrying, stamp_of, without_query
from .resolve import METADATA, Named, Resolved, Source, as_source, resolve, resolve_url
from .stream import BatchSource, LibrarySource, Stream
from .table import PairTable
from .tar_records import TarSource, read_remote_tars, read_tars


class Columns(NamedTuple):
    """Columns of a source; without a column of image ids, "image_id" is read if it exists."""

    image: str
    caption: str
    image_id: str | None


@dataclass
class Opening:
    """Settings of a datamodule that all of its sources share.

    Args:
        image_root: folder that relative image paths start from, and that no image path may leave.
        image_column: column of the images.
        caption_column: column of the captions.
        image_id_column: column of the image ids; None for "image_id" if that exists.
        cache_dir: folder of the converted data; None for the default of the `datasets` library.
        need_captions: whether a source without captions (or labels) is an error.
        labels: whether the caption column holds labels (integers or names). The label of an image in a folder is the
            name of the folder.
        retries: number of times that a failed read of a file by URL is tried again.
        texts: whether the rows are parallel texts: the image column then holds new texts, which are no paths, and the
            caption column old texts.
    """

    image_root: str | None
    image_column: str
    caption_column: str
    image_id_column: str | None
    cache_dir: str | None
    need_captions: bool = True
    labels: bool = False
    retries: int = RETRIES
    texts: bool = False

    def open(self, source: Named, split: str, streaming: bool = False) -> tuple[Any, Layout]:
        """Open one source.

        Returns:
            A `datasets.Dataset` whose images are not decoded (a `StreamedSource` for streaming), and
            the layout of its rows.

        Raises:
            UserError: If the source does not exist, or lacks a column.
        """
        if isinstance(source, MemoryRows):
            return self._open_memory(source, streaming)
        source = as_source(source)
        columns = Columns(
            source.image_column or self.image_column,
            source.caption_column or self.caption_column,
            source.image_id_column or self.image_id_column,
        )
        with retrying(self.retries), _converting(source.path, split):
            resolved = resolve_url(source) if is_remote(source.path) else resolve(source)
            is_table = resolved.format == "parquet" and not streaming and not is_remote(source.path)
            if is_table or resolved.format in ("hub", "disk"):
                return self._open_library(source, resolved, columns, split, streaming)
            return self._open_files(source, resolved, columns, split, streaming)

    def _root(self, source: Source, folder: str) -> tuple[str, bool]:
        """Return the folder that relative image paths start from, and whether the user named it."""
        named = keep(source.image_root or self.image_root)
        root = named or folder
        return root if is_remote(root) else os.path.abspath(os.path.expanduser(root)), named is not None

    # Rows in memory

    def _open_memory(self, rows: MemoryRows, streaming: bool) -> tuple[Any, Layout]:
        from datasets import Dataset

        if streaming:
            raise UserError("Expected files with data.streaming, got rows in memory: set data.streaming to false.")
        columns = Columns(self.image_column, self.caption_column, self.image_id_column)
        if isinstance(rows.content, Dataset):
            return self._of_library(rows.content, Source(rows.path), columns, ".", False)
        if (names := rows.columns) is not None:
            self._check_columns(names, columns, rows.path)
        root = os.path.abspath(os.path.expanduser(self.image_root or "."))
        read = columns._replace(image_id=columns.image_id or "image_id")
        records = [record(partial(_of_memory, *values)) for values in rows.rows(read)]
        if not records:
            raise UserError(f"Expected rows in {rows.path}, got none: check the rows.")
        table = pa.Table.from_pylist(records, schema=RECORD)
        layout = Layout(
            rows.path,
            "image",
            "caption",
            "image_id",
            root,
            rows.classes if self.labels else None,
            FAULT,
            confined=self.image_root is not None,
            needs_id=columns.image_id is not None,
        )
        return Dataset(table), layout

    # Files that are read by this project, as uniform records

    def _open_files(
        self, source: Source, resolved: Resolved, columns: Columns, split: str, streaming: bool
    ) -> tuple[Any, Layout]:
        kind, files, folder = resolved
        root, is_named = self._root(source, folder)
        classes = None
        if kind in ("oxford_iiit_pet", "food101"):
            files = [list_of_split(kind, folder, source.split, split)]
            classes = class_names(kind, folder)
        layout = Layout(
            source.path,
            "image",
            "caption",
            None if classes else "image_id",
            root,
            classes,
            FAULT,
            # The root confines the paths in lists and tables only: the reader itself finds the files of a folder.
            # Of a list by URL they are always confined, since it may come from anyone.
            confined=(is_named and kind in ("json", "parquet")) or (is_remote(root) and kind != "webdataset"),
            needs_id=columns.image_id is not None and classes is None,
            weight=source.weight,
            retries=self.retries,
        )
        reader, arguments = self._reader(source, resolved, columns, split)
        if streaming and kind == "webdataset":
            index = index_cache(self.cache_dir)
            return TarSource(files, columns.caption, columns.image_id, index, self.retries), layout
        if streaming and kind == "parquet":
            return ParquetSource(files, *columns, self.retries), layout
        if streaming:
            if reader is read_list_batches:
                arguments["retries"] = self.retries  # the rows are read later, in other processes
            return BatchSource(files, partial(_batches, reader=reader, arguments=arguments)), layout
        key = (reader.__module__, reader.__qualname__, arguments, files, [stamp_of(file) for file in files])

        def make() -> Iterator[pa.RecordBatch]:
            batches = _batches(files, reader, arguments)
            return uncollected(batches) if reader is read_list_batches else batches

        return cached_rows(make, RECORD, key, self.cache_dir, source.path, split), layout

    def _reader(
        self, source: Source, resolved: Resolved, columns: Columns, split: str
    ) -> tuple[Callable[..., Iterator[Any]], dict[str, Any]]:
        """Return the generator of the records of files, in batches of lists, and its arguments beside the files."""
        kind, files, folder = resolved
        if kind in ("oxford_iiit_pet", "food101"):
            return read_authors_list, {"data_set": kind, "folder": folder}
        if kind == "webdataset":
            reader = read_remote_tars if is_remote(files[0]) else read_tars
            return reader, {"caption": columns.caption, "image_id": columns.image_id}
        if kind == "imagefolder" and not without_query(files[0]).endswith(METADATA):
            return self._folder_reader(source, len(files))
        if kind == "json" and is_karpathy(files[0]):
            return read_karpathy, {"split": source.split, "role": split}
        if kind == "parquet":
            self._check_schema(parquet_schema(files[0]), columns, source.path)
            return read_parquets, columns._asdict()
        if kind == "imagefolder":
            columns = columns._replace(image="file_name")
        if keys := first_keys(files[0]):
            self._check_columns(keys, columns, source.path)
        return read_list_batches, columns._asdict()

    def _folder_reader(self, source: Source, images: int) -> tuple[Callable[..., Iterator[Any]], dict[str, Any]]:
        """Return the generator of the records of images without a list, and its arguments beside the files."""
        if not self.need_captions:
            return read_folder, {}
        folder = os.path.expanduser(source.path)
        if not os.path.isdir(folder):
            what = "labels" if self.labels else "captions"
            raise UserError(
                f"Expected images with {what}, got {images} image(s) without {what} in {source.path!r}: name their "
                "folder, or another source."
            )
        if not self.labels:
            raise UserError(
                f"Expected captions in one of {', '.join(METADATA)} in {source.path!r}, got {images} images without "
                "captions: add the file, or name another source."
            )
        return read_class_folders, {"root": os.path.abspath(folder)}

    # Sources that the `datasets` library reads

    def _open_library(
        self, source: Source, resolved: Resolved, columns: Columns, split: str, streaming: bool
    ) -> tuple[Any, Layout]:
        root, is_named = self._root(source, resolved.folder)
        # The library resolves the image paths of hub datasets.
        confined = is_named and resolved.format == "parquet"
        dataset, layout = self._of_library(
            self._load(source, resolved, split, streaming), source, columns, root, confined
        )
        return LibrarySource(dataset) if streaming else dataset, layout

    def _of_library(
        self, dataset: Any, source: Source, columns: Columns, root: str, confined: bool
    ) -> tuple[Any, Layout]:
        """Return the columns of a dataset that are read, and their layout.

        Args:
            dataset: a dataset of the library.
            source: its name and options.
            columns: its columns.
            root: folder that relative paths start from.
            confined: whether they may not leave it.
        """
        from datasets import Image

        if dataset.features is None:
            dataset = dataset._resolve_features()
        features = dataset.features
        self._check_schema(features.arrow_schema, columns, source.path)
        if isinstance(features[columns.image], Image):
            dataset = dataset.cast_column(columns.image, Image(decode=False))
        caption = columns.caption if columns.caption in features else None
        image_id = columns.image_id or ("image_id" if "image_id" in features else None)
        names = getattr(features[caption], "names", None) if caption is not None else None
        layout = Layout(
            source.path,
            columns.image,
            caption,
            image_id,
            root,
            tuple(names) if names else None,
            confined=confined,
            needs_id=columns.image_id is not None,
            weight=source.weight,
        )
        selected = dataset.select_columns([name for name in (columns.image, caption, image_id) if name is not None])
        return selected, layout

    def _load(self, source: Source, resolved: Resolved, split: str, streaming: bool) -> Any:
        import datasets

        if resolved.format == "parquet":
            parquet_schema(resolved.files[0])  # raises an error for a name that is not unique
            rows = source.split or "train"
            try:
                return datasets.load_dataset("parquet", data_files=resolved.files, split=rows, cache_dir=self.cache_dir)
            except ValueError as error:
                if source.split is None:
                    raise
                raise UserError(
                    "Expected rows of the split train, such as train[:100] or train[10%:], as the split of "
                    f"{source.path!r}, got {source.split!r} ({error}): correct it."
                ) from error
        if resolved.format == "disk":
            dataset = _split_of(datasets.load_from_disk(source.path), source, split)
            return dataset.to_iterable_dataset(len(dataset.cache_files) or 1) if streaming else dataset
        try:
            with hub_or_cache():
                splits = datasets.load_dataset(source.path, source.name, streaming=streaming, cache_dir=self.cache_dir)
        except Exception as error:
            raise UserError(
                f"Expected a file, a folder or a hub dataset, got {source.path!r} ({reason_not_found(error)}): correct "
                f"the name{nearest_path(source.path)}."
            ) from error
        return _split_of(splits, source, split)

    # Checks

    @property
    def _caption_option(self) -> str:
        return "old_column" if self.texts else "label_column" if self.labels else "caption_column"

    def _check_columns(self, names: Sequence[str], columns: Columns, origin: str) -> None:
        """Check that a source has its columns, which may be without captions if these are not needed."""
        options = ("new_column" if self.texts else "image_column", self._caption_option, "image_id_column")
        for column, option in zip(columns, options, strict=True):
            needed = column is not None and (column != columns.caption or self.need_captions)
            if needed and column not in names:
                raise UserError(no_column(str(column), names, origin, option))

    def _check_schema(self, schema: pa.Schema, columns: Columns, origin: str) -> None:
        """Check that a source has its columns, and that these hold images and captions (or labels)."""
        self._check_columns(schema.names, columns, origin)
        others = ", ".join(schema.names)
        images = _value_type(schema, columns.image)
        if self.texts and not is_text_type(images):
            raise UserError(
                f"Expected texts in the column {columns.image!r} of {origin!r}, got {images}: set data.new_column to "
                f"one of {others}."
            )
        if not _holds_images(images):
            raise UserError(
                f"Expected images, encoded bytes or paths in the column {columns.image!r} of {origin!r}, got {images}: "
                f"set data.image_column to one of {others}."
            )
        if columns.caption not in schema.names:
            return
        captions = _value_type(schema, columns.caption)
        # The type of a list's values in all of Arrow's layouts; a label is no list.
        single = captions if self.labels else getattr(captions, "value_type", captions)
        if not (is_text_type(single) or (self.labels and pa.types.is_integer(single))):
            kinds = "integers or names" if self.labels else "a string or a list of strings"
            raise UserError(
                f"Expected {kinds} in the column {columns.caption!r} of {origin!r}, got {captions}: set "
                f"data.{self._caption_option} to one of {others}."
            )


@contextlib.contextmanager
def _converting(origin: str, split: str) -> Iterator[None]:
    """Raise an error of the library's readers on a source without rows as an error for the user.

    Raises:
        UserError: If the source has no rows.
    """
    try:
        yield
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        raise UserError(f"Expected rows in the {split} split ({origin!r}), got none: check the path.") from None


def resolve_tables(source: Source, content: str) -> Resolved:
    """Find the files of a source of lists or Parquet on a disk.

    Args:
        source: the source.
        content: what the files hold, for the message.

    Raises:
        UserError: If the source does not exist, or is of another format.
    """
    resolved = resolve(source)
    if resolved.format not in ("json", "parquet"):
        raise UserError(
            f"Expected .json, .jsonl, .csv or .parquet files with {content}, got {source.path!r} of the format "
            f"{resolved.format}: convert the data."
        )
    return resolved


def no_column(column: str, names: Sequence[str], origin: str, option: str) -> str:
    """Return the message on a source without a column."""
    near = nearest(column, names, 1)
    suggestion = repr(near[0]) if near else "the right one"
    return (
        f"Expected the column {column!r} in {origin!r}, got the columns {', '.join(names)}: set data.{option} to "
        f"{suggestion}."
    )


def _of_memory(image: Any, texts: Any, identity: Any) -> Record:
    """Return the record of a row in memory, without the entry of a fault."""
    if image is None or plain_value(image) is None:
        raise BadSample("no image", "")
    captions = captions_in(plain_value(texts))
    return {"image": stored_image(image), "caption": captions, "image_id": identity_in(plain_value(identity))}


def _batches(
    files: list[str], reader: Callable[..., Iterator[Any]], arguments: dict[str, Any]
) -> Iterator[pa.RecordBatch]:
    """Return the records of files in batches."""
    rows = reader(files, **arguments)
    return rows if reader is read_list_batches else record_batches(rows)


def _split_of(splits: Any, source: Source, split: str) -> Any:
    """Return the split of a dataset that a source names, or else that of the datamodule."""
    if not isinstance(splits, dict):
        return splits
    name = source.split or ("test" if split == "predict" else split)
    if name not in splits:
        raise UserError(
            f"Expected the split {name!r} in {source.path!r}, got {', '.join(splits)}: name one of them as `split`."
        )
    return splits[name]


def _value_type(schema: pa.Schema, column: str) -> pa.DataType:
    """Return the type of the values of a column, also of a dictionary."""
    kind = schema.field(column).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 or kind.get_field_index("path") >= 0
    return is_text_type(kind) or is_binary_type(kind)


def open_split(
    opening: Opening,
    sources: dict[Split, list[Named]],
    split: Split,
    division: Division | None = None,
    streaming: bool = False,
) -> list[tuple[Any, Layout]]:
    """Open the sources of a split; return each with its layout.

    Args:
        opening: settings of the datamodule.
        sources: sources by split.
        split: the split; prediction needs no captions or labels.
        division: of the training sources, if these have the rows of all splits.
        streaming: whether the sources are streamed.

    Raises:
        UserError: If a source cannot be opened or divided.
    """
    opening = dataclasses.replace(opening, need_captions=split != "predict")
    divides = division is not None and split in division.shares
    opened = [opening.open(source, "train" if divides else split, streaming) for source in sources[split]]
    return division.rows(split, opened) if divides and division is not None else opened


@dataclass
class PairSources:
    """Sources of the image-caption pairs of each split, which are streamed or memory-mapped."""

    sources: dict[Split, list[Named]]
    opening: Opening
    max_pixels: int
    streaming: bool = False
    division: Division | None = None

    def open(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split; return each with its layout."""
        return open_split(self.opening, self.sources, split, self.division, self.streaming)

    def rows(self, split: Split, clean: bool, max_words: int, need_images: bool = True) -> PairTable | Stream | None:
        """Open and check the rows of a split.

        Args:
            split: the split.
            clean: whether captions are cleaned.
            max_words: most words of a caption.
            need_images: whether images that cannot be read are an error, as they are not where a store has features.

        Returns:
            The rows; None if the split has no source.

        Raises:
            UserError: If a source cannot be opened, or no probed row can be used.
        """
        sources = self.open(split)
        if not sources:
            return None
        if self.streaming:
            stream = Stream(sources, self.max_pixels)
            stream.check(split, split != "predict", clean, max_words)
            return stream
        table = PairTable(sources, self.max_pixels)
        table.check(split, split != "predict", clean, max_words, need_images)
        return table
