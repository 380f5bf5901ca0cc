"""Opening of sources: Parquet, JSON, CSV, image folders, WebDataset shards, hub names."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ...common.errors import UserError
from ...common.hub import hub_or_cache, reason_not_found
from ...common.names import nearest
from ...common.urls import keep
from .arrow_types import is_binary_type, is_text_type
from .authors_folder import DataSet, class_names, list_of_split, read_authors_list
from .cache import index_cache
from .karpathy import is_karpathy, read_karpathy
from .layout import Layout
from .lists import first_keys, read_class_folders, read_folder, read_list
from .parquet import RemoteParquetSource, column_names, read_parquets
from .record import FAULT
from .remote import RETRIES, is_remote, retrying, stamp_of, without_query
from .resolve import METADATA, Format, Source, as_source, nearest_path, resolve, resolve_url
from .streamed import LibrarySource, ParquetSource
from .tar_records import TarSource, read_remote_tars, read_tars


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
    """

    image_root: str | None
    image_column: str
    caption_column: str
    image_id_column: str | None
    cache_dir: str | None
    need_captions: bool = True
    labels: bool = False
    retries: int = RETRIES

    def open(self, source: str | Source, split: str, streaming: bool = False) -> tuple[Any, Layout]:
        """Open one source.

        Args:
            source: the source.
            split: split of the datamodule, for hub datasets and messages.
            streaming: whether to stream the rows instead of memory-mapping a copy.

        Returns:
            A `datasets.Dataset` whose images are not decoded (a `StreamedSource` for streaming), and
            the layout of its rows.

        Raises:
            UserError: If the source does not exist, or lacks a column.
        """
        with retrying(self.retries):
            return self._open(as_source(source), split, streaming)

    def _open(self, spec: Source, split: str, streaming: bool) -> tuple[Any, Layout]:
        remote = is_remote(spec.path)
        kind, files, folder = resolve_url(spec) if remote else resolve(spec)
        image = spec.image_column or self.image_column
        caption = spec.caption_column or self.caption_column
        image_id = spec.image_id_column or self.image_id_column
        named = keep(spec.image_root or self.image_root)
        root = named or folder
        root = root if is_remote(root) else os.path.abspath(os.path.expanduser(root))
        columns = (image, caption, image_id)
        try:
            if kind in ("oxford_iiit_pet", "food101"):
                files = [list_of_split(kind, folder, spec.split, split)]
                dataset = self._records(spec, kind, files, columns, split, streaming, folder)
                return dataset, Layout(spec.path, "image", "caption", None, root, class_names(kind, folder), FAULT)
            if kind in ("json", "imagefolder", "webdataset") or remote:
                dataset = self._records(spec, kind, files, columns, split, streaming)
                # The root confines the paths in lists only: the reader itself finds the files of a folder.
                # Of a list by URL they are always confined, since it may come from anyone.
                confined = (named is not None and kind == "json") or (is_remote(root) and kind != "webdataset")
                return dataset, Layout(
                    spec.path,
                    "image",
                    "caption",
                    "image_id",
                    root,
                    fault=FAULT,
                    confined=confined,
                    needs_id=image_id is not None,
                    weight=spec.weight,
                    retries=self.retries,
                )
            dataset = self._library(spec, kind, files, split, streaming)
        except ValueError as error:
            if "corresponds to no data" not in str(error):
                raise
            raise UserError(f"Expected rows in the {split} split ({spec.path!r}), got none: check the path.") from None
        dataset, layout = self._with_columns(dataset, spec, columns, root)
        # The library resolves the image paths of hub datasets.
        confined = named is not None and kind == "parquet"
        layout = dataclasses.replace(layout, confined=confined, needs_id=image_id is not None, weight=spec.weight)
        if not streaming:
            return dataset, layout
        counted = kind == "parquet" and dataset.num_shards == len(files)
        return ParquetSource(dataset, files) if counted else LibrarySource(dataset), layout

    def _records(
        self,
        spec: Source,
        kind: Format | DataSet,
        files: list[str],
        columns: tuple[str, str, str | None],
        split: str,
        streaming: bool,
        folder: str = "",
    ) -> Any:
        from datasets import Dataset, Features, IterableDataset, List, Value

        features = Features(
            {
                "image": {"bytes": Value("binary"), "path": Value("string")},
                "caption": List(Value("string")),
                "image_id": Value("string"),
                FAULT: Value("string"),
            }
        )
        image, caption, image_id = columns
        arguments: dict[str, Any] = {"files": files, "stamp": [file_stamp(file) for file in files]}
        reader: Any
        if kind in ("oxford_iiit_pet", "food101"):
            reader = read_authors_list
            arguments |= {"data_set": kind, "folder": folder}
        elif kind == "webdataset":
            reader = read_remote_tars if is_remote(files[0]) else read_tars
            arguments |= {"caption": caption, "image_id": image_id}
        elif kind == "imagefolder" and not without_query(files[0]).endswith(METADATA):
            reader = read_folder
            if self.need_captions and not os.path.isdir(os.path.expanduser(spec.path)):
                what = "labels" if self.labels else "captions"
                raise UserError(
                    f"Expected images with {what}, got {len(files)} image(s) without {what} in {spec.path!r}: name "
                    "their folder, or another source."
                )
            if self.labels and self.need_captions:
                reader = read_class_folders
                arguments["root"] = os.path.abspath(os.path.expanduser(spec.path))
            elif self.need_captions:
                raise UserError(
                    f"Expected captions in one of {', '.join(METADATA)} in {spec.path!r}, got {len(files)} images "
                    "without captions: add the file, or name another source."
                )
        elif kind == "json" and is_karpathy(files[0]):
            reader = read_karpathy
            arguments |= {"split": spec.split, "role": split}
        else:
            reader = read_parquets if kind == "parquet" else read_list
            if kind == "imagefolder":
                image = "file_name"
            keys = column_names(files[0]) if kind == "parquet" else first_keys(files[0])
            options = ("image_column", self._caption_option, "image_id_column")
            for column, option in zip((image, caption, image_id), options, strict=True):
                if keys and column is not None and column not in keys and (column != caption or self.need_captions):
                    raise UserError(no_column(column, keys, spec.path, option))
            arguments |= {"image": image, "caption": caption, "image_id": image_id}
        if streaming and kind == "webdataset":
            return TarSource(files, caption, image_id, index_cache(self.cache_dir), self.retries)
        if streaming and kind == "parquet":
            return RemoteParquetSource(files, image, caption, image_id, self.retries)
        if streaming and reader is read_list:
            arguments["retries"] = self.retries  # the rows are read later, in other processes
        if streaming:
            data = IterableDataset.from_generator(reader, features=features, gen_kwargs=arguments)
            return LibrarySource(data)
        try:
            return Dataset.from_generator(reader, features=features, gen_kwargs=arguments, cache_dir=self.cache_dir)
        except Exception as error:
            cause = error.__cause__ or error.__context__
            if isinstance(cause, UserError) and "DatasetGeneration" in type(error).__name__:
                raise cause from None  # the library wraps the error of the reader
            raise

    def _library(self, spec: Source, kind: Format | DataSet, files: list[str], split: str, streaming: bool) -> Any:
        import datasets

        if kind == "disk":
            dataset = self._choose(datasets.load_from_disk(spec.path), spec, split)
            return dataset.to_iterable_dataset(len(dataset.cache_files) or 1) if streaming else dataset
        if kind == "parquet":
            column_names(files[0])  # raises an error for a name that is not unique
            return datasets.load_dataset(
                "parquet", data_files=files, split=spec.split or "train", streaming=streaming, cache_dir=self.cache_dir
            )
        try:
            with hub_or_cache():
                dataset = datasets.load_dataset(spec.path, spec.name, streaming=streaming, cache_dir=self.cache_dir)
        except Exception as error:
            raise UserError(
                f"Expected a file, a folder or a hub dataset, got {spec.path!r} ({reason_not_found(error)}): correct "
                f"the name{nearest_path(spec.path)}."
            ) from error
        return self._choose(dataset, spec, split)

    @property
    def _caption_option(self) -> str:
        return "label_column" if self.labels else "caption_column"

    def _choose(self, dataset: Any, spec: Source, split: str) -> Any:
        if not isinstance(dataset, dict):
            return dataset
        wanted = spec.split or ("test" if split == "predict" else split)
        if wanted not in dataset:
            raise UserError(
                f"Expected the split {wanted!r} in {spec.path!r}, got {', '.join(dataset)}: name one of them as "
                "`split`."
            )
        return dataset[wanted]

    def _with_columns(
        self, dataset: Any, spec: Source, columns: tuple[str, str, str | None], root: str
    ) -> tuple[Any, Layout]:
        import datasets

        features = dataset.features
        if features is None:
            dataset = dataset._resolve_features()
            features = dataset.features
        names = list(features)
        image, caption, image_id = columns
        if image not in names:
            raise UserError(no_column(image, names, spec.path, "image_column"))
        if caption not in names and self.need_captions:
            raise UserError(no_column(caption, names, spec.path, self._caption_option))
        if image_id is not None and image_id not in names:
            raise UserError(no_column(image_id, names, spec.path, "image_id_column"))
        if isinstance(features[image], datasets.Image):
            dataset = dataset.cast_column(image, datasets.Image(decode=False))
        elif not _holds_images(features[image]):
            raise UserError(
                f"Expected images, encoded bytes or paths in the column {image!r} of {spec.path!r}, got "
                f"{features[image]}: set data.image_column to one of {', '.join(names)}."
            )
        wanted = "integers or names" if self.labels else "a string or a list of strings"
        if caption in names and not (_holds_labels if self.labels else _holds_text)(features[caption]):
            raise UserError(
                f"Expected {wanted} in the column {caption!r} of {spec.path!r}, got {features[caption]}: set "
                f"data.{self._caption_option} to one of {', '.join(names)}."
            )
        if image_id is None and "image_id" in names:
            image_id = "image_id"
        classes = getattr(features[caption], "names", None) if caption in names else None
        layout = Layout(
            spec.path, image, caption if caption in names else None, image_id, root, tuple(classes) if classes else None
        )
        kept = [column for column in (image, layout.caption, image_id) if column is not None]
        return dataset.select_columns(kept), layout


def no_column(column: str, names: Sequence[str], origin: str, option: str) -> str:
    """Return the message on a source without a column."""
    near = nearest(column, names, 1)
    suggestion = repr(near[0]) if near else "the right one"
    return (
        f"Expected the column {column!r} in {origin!r}, got the columns {', '.join(names)}: set data.{option} to "
        f"{suggestion}."
    )


def _holds_images(feature: Any) -> bool:
    if isinstance(feature, dict):
        return "bytes" in feature or "path" in feature
    return is_text_type(_arrow_type(feature)) or is_binary_type(_arrow_type(feature))


def _holds_text(feature: Any) -> bool:
    inner = getattr(feature, "feature", feature)
    if isinstance(feature, list):
        inner = feature[0]
    return is_text_type(_arrow_type(inner))


def _holds_labels(feature: Any) -> bool:
    kind = _arrow_type(feature)
    return is_text_type(kind) or pa.types.is_integer(kind)


def _arrow_type(feature: Any) -> pa.DataType:
    """Return the Arrow type of values of a feature of the `datasets` library; null for features of other kinds."""
    kind = getattr(feature, "pa_type", None)
    return kind if isinstance(kind, pa.DataType) else pa.null()


def file_stamp(file: str) -> str:
    """Return a text that changes with a file, so that the cache of its rows does not outlive it."""
    return hashlib.sha1(stamp_of(file).encode()).hexdigest()
