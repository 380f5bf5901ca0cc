"""Opening the rows of a split: Parquet, JSON, image folders, WebDataset shards, hub names."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace

from .hub import absence, hub_or_cache
from .karpathy import is_karpathy, read_karpathy
from .records import FAULT, IMAGE_SUFFIXES, METADATA, first_keys, read_class_folders, read_folder, read_list, read_tars
from .streamed import ParquetSource, StreamedSource, TarSource
from .table import Layout
from .tar import index_cache

Format = Literal["auto", "parquet", "json", "imagefolder", "webdataset", "hub", "disk"]
_ENDINGS: dict[str, Format] = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "json",
    ".tar": "webdataset",
    **{ending: "imagefolder" for ending in IMAGE_SUFFIXES},
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Source:
    """Where rows come from, for the cases that a path alone does not settle.

    Args:
        path: file, glob pattern, folder, or hub name.
        format: how to read it; told from the ending or the folder's content by default.
        split: split of a hub data set; the datamodule's own split by default ("test" for prediction). Of a file with
            Karpathy's splits too, where "train+restval" reads both, which is the default for training.
        name: configuration of a hub data set.
        image_root: folder that relative image paths start from, and that no path may leave; by default the
            datamodule's, else the file's own folder, which paths may leave.
        image_column: column of the images, where it differs from the datamodule's.
        caption_column: column of the captions, where it differs from the datamodule's.
        image_id_column: column of the image ids, where it differs from the datamodule's.
    """

    path: str
    format: Format = "auto"
    split: str | None = None
    name: str | None = None
    image_root: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    image_id_column: str | None = None


def as_source(source: Any) -> Source:
    """A source from the forms in which it may be given.

    From a checkpoint it comes back as a dict; jsonargparse leaves it a namespace where a list mixes sources and paths.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Namespace):
        source = source.as_dict()
    if isinstance(source, dict):
        return Source(**source.get("init_args", source))
    return Source(os.fspath(source))


@dataclass
class Opening:
    """The datamodule's settings that all sources share.

    Args:
        image_root: folder that relative image paths start from, and that no path may leave.
        image_column: column of the images.
        caption_column: column of the captions.
        image_id_column: column of the image ids; None: "image_id" where there is one.
        cache_dir: where converted data is kept; the ``datasets`` library's own folder by default.
        need_captions: whether a source without captions, or labels, is an error.
        labels: whether the caption column holds labels of classes: whole numbers or names. Images in folders have
            their folder's name for a label.
    """

    image_root: str | None
    image_column: str
    caption_column: str
    image_id_column: str | None
    cache_dir: str | None
    need_captions: bool = True
    labels: bool = False

    def open(self, source: str | Source, split: str, streaming: bool = False) -> tuple[Any, Layout]:
        """Open one source.

        Args:
            source: where the rows are.
            split: name of the datamodule's split, for hub data sets and messages.
            streaming: read on the fly instead of through a memory-mapped copy.

        Returns:
            A ``datasets.Dataset`` whose images are not decoded (a :class:`StreamedSource` for streaming), and how to
            read its rows.

        Raises:
            ValueError: there is no such source, or not the expected columns in it.
        """
        spec = as_source(source)
        kind, files, folder = _resolve(spec)
        image = spec.image_column or self.image_column
        caption = spec.caption_column or self.caption_column
        image_id = spec.image_id_column or self.image_id_column
        named = spec.image_root or self.image_root
        root = os.path.abspath(os.path.expanduser(named or folder))
        columns = (image, caption, image_id)
        try:
            if kind in ("json", "imagefolder", "webdataset"):
                dataset = self._records(spec, kind, files, columns, split, streaming)
                # What the reader found by itself in folders is where it is, whatever the lists' root.
                confined = named is not None and kind == "json"
                named_id = image_id is not None
                layout = Layout(spec.path, "image", "caption", "image_id", root, None, FAULT, confined, named_id)
                return dataset, layout
            dataset = self._library(spec, kind, files, split, streaming)
        except ValueError as error:
            if "corresponds to no data" not in str(error):
                raise
            raise ValueError(
                f"found no rows in the {split} split ({spec.path!r}), expected some: check the path"
            ) from None
        dataset, layout = self._with_columns(dataset, spec, columns, root)
        # The library knows where the images of the hub's data sets are.
        confined = named is not None and kind == "parquet"
        layout = dataclasses.replace(layout, confined=confined, needs_id=image_id is not None)
        if not streaming:
            return dataset, layout
        counted = kind == "parquet" and dataset.num_shards == len(files)
        return ParquetSource(dataset, files) if counted else StreamedSource(dataset), layout

    def _records(
        self,
        spec: Source,
        kind: Format,
        files: list[str],
        columns: tuple[str, str, str | None],
        split: str,
        streaming: bool,
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
        arguments: dict[str, Any] = {"files": files, "stamp": [_stamp(file) for file in files]}
        reader: Any
        if kind == "webdataset":
            reader = read_tars
            arguments |= {"caption": caption, "image_id": image_id}
        elif kind == "imagefolder" and not files[0].endswith(METADATA):
            reader = read_folder
            if self.need_captions and not os.path.isdir(os.path.expanduser(spec.path)):
                raise ValueError(
                    f"found {len(files)} image(s) in {spec.path!r} and nothing that says more of them, expected "
                    f"{'labels' if self.labels else 'captions'}: name a folder with them, or another source"
                )
            if self.labels and self.need_captions:
                reader = read_class_folders
                arguments["root"] = os.path.abspath(os.path.expanduser(spec.path))
            elif self.need_captions:
                raise ValueError(
                    f"found {len(files)} images but none of {', '.join(METADATA)} in {spec.path!r}, expected one "
                    "with the captions: add it, or name another source"
                )
        elif kind == "json" and is_karpathy(files[0]):
            reader = read_karpathy
            arguments |= {"split": spec.split, "role": split}
        else:
            reader = read_list
            if kind == "imagefolder":
                image = "file_name"
            keys = first_keys(files[0])
            options = ("image_column", self._caption_option, "image_id_column")
            for column, option in zip((image, caption, image_id), options, strict=True):
                if keys and column is not None and column not in keys and (column != caption or self.need_captions):
                    raise ValueError(_no_column(column, keys, spec.path, option))
            arguments |= {"image": image, "caption": caption, "image_id": image_id}
        if streaming and kind == "webdataset":
            return TarSource(files, caption, image_id, index_cache(self.cache_dir))
        if streaming:
            data = IterableDataset.from_generator(reader, features=features, gen_kwargs=arguments)
            return StreamedSource(data)
        try:
            return Dataset.from_generator(reader, features=features, gen_kwargs=arguments, cache_dir=self.cache_dir)
        except Exception as error:
            cause = error.__cause__ or error.__context__
            if isinstance(cause, ValueError) and "DatasetGeneration" in type(error).__name__:
                raise cause from None  # the reader's own sentence, which the library wraps
            raise

    def _library(self, spec: Source, kind: Format, files: list[str], split: str, streaming: bool) -> Any:
        import datasets

        if kind == "disk":
            dataset = self._choose(datasets.load_from_disk(spec.path), spec, split)
            return dataset.to_iterable_dataset(len(dataset.cache_files) or 1) if streaming else dataset
        if kind == "parquet":
            return datasets.load_dataset(
                "parquet", data_files=files, split=spec.split or "train", streaming=streaming, cache_dir=self.cache_dir
            )
        try:
            with hub_or_cache():
                dataset = datasets.load_dataset(spec.path, spec.name, streaming=streaming, cache_dir=self.cache_dir)
        except Exception as error:
            raise ValueError(
                f"found neither a file nor a hub data set {spec.path!r} ({absence(error)}), expected one of them: "
                f"correct the name{_nearest_path(spec.path)}"
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
            raise ValueError(
                f"found the splits {', '.join(dataset)} in {spec.path!r}, expected {wanted!r}: "
                "name one of them as `split`"
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
            raise ValueError(_no_column(image, names, spec.path, "image_column"))
        if caption not in names and self.need_captions:
            raise ValueError(_no_column(caption, names, spec.path, self._caption_option))
        if image_id is not None and image_id not in names:
            raise ValueError(_no_column(image_id, names, spec.path, "image_id_column"))
        if isinstance(features[image], datasets.Image):
            dataset = dataset.cast_column(image, datasets.Image(decode=False))
        elif not _holds_images(features[image]):
            raise ValueError(
                f"found {features[image]} in the column {image!r} of {spec.path!r}, expected images, encoded bytes "
                f"or paths: set data.image_column to one of {', '.join(names)}"
            )
        wanted = "whole numbers or names" if self.labels else "a string or a list of strings"
        if caption in names and not (_holds_labels if self.labels else _holds_text)(features[caption]):
            raise ValueError(
                f"found {features[caption]} in the column {caption!r} of {spec.path!r}, expected {wanted}: "
                f"set data.{self._caption_option} to one of {', '.join(names)}"
            )
        if image_id is None and "image_id" in names:
            image_id = "image_id"
        classes = getattr(features[caption], "names", None) if caption in names else None
        layout = Layout(
            spec.path, image, caption if caption in names else None, image_id, root, tuple(classes) if classes else None
        )
        kept = [column for column in (image, layout.caption, image_id) if column is not None]
        return dataset.select_columns(kept), layout


def _resolve(spec: Source) -> tuple[Format, list[str], str]:
    """Format, files, and the folder that relative image paths start from."""
    path = os.path.expanduser(spec.path)
    if os.path.isdir(path):
        return _resolve_folder(spec, path)
    if os.path.isfile(path):
        files = [path]
    elif glob.has_magic(path):
        files = sorted(glob.glob(path, recursive=True))
        if not files:
            raise ValueError(f"found no file that matches {spec.path!r}, expected some: correct the pattern")
    elif spec.format == "hub" or (spec.format == "auto" and not _looks_local(path)):
        return "hub", [], "."
    else:
        hub = ", or give `format: hub`" if spec.format == "auto" and _HUB_NAME.fullmatch(path) else ""
        raise ValueError(
            f"found no file {spec.path!r}, nor a folder, expected one: correct the path{_nearest_path(spec.path)}{hub}"
        )
    kind = spec.format
    if kind == "auto":
        kinds = {_ENDINGS.get(Path(file).suffix.lower()) for file in files}
        if len(kinds) > 1 or None in kinds:
            endings = sorted({Path(file).suffix for file in files})
            raise ValueError(
                f"found the ending(s) {endings} in {spec.path!r}, expected one of {', '.join(_ENDINGS)}: "
                "convert the data, or give `format`"
            )
        kind = kinds.pop()  # type: ignore[assignment]
    return kind, [os.path.abspath(file) for file in files], os.path.dirname(os.path.abspath(files[0]))


def _resolve_folder(spec: Source, path: str) -> tuple[Format, list[str], str]:
    folder = Path(os.path.abspath(path))
    if spec.format == "disk" or (spec.format == "auto" and (folder / "state.json").exists()):
        return "disk", [], str(folder)
    if spec.format == "auto" and (folder / "dataset_dict.json").exists():
        return "disk", [], str(folder)
    if spec.format in ("auto", "imagefolder"):
        for name in METADATA:
            if (folder / name).exists():
                return "imagefolder", [str(folder / name)], str(folder)
    for kind, endings in (
        ("parquet", (".parquet",)),
        ("webdataset", (".tar",)),
        ("json", (".json", ".jsonl")),
        ("imagefolder", IMAGE_SUFFIXES),
    ):
        if spec.format in ("auto", kind):
            files = sorted(str(file) for file in folder.rglob("*") if file.suffix.lower() in endings)
            if files:
                return kind, files, str(folder)  # type: ignore[return-value]
    raise ValueError(
        f"found {len(list(folder.iterdir()))} entries in the folder {spec.path!r} but no Parquet, tar or JSON file, "
        f"image or {METADATA[0]}, expected some: give another folder"
    )


def _looks_local(path: str) -> bool:
    """Whether a name can only be meant for something on disk: by its form, or because it is in a folder that exists."""
    if path.startswith((".", "/", "~")) or (not _HUB_NAME.fullmatch(path) and "/" in path):
        return True
    return Path(path).suffix.lower() in _ENDINGS or ("/" in path and Path(path).parent.is_dir())


def _nearest_path(path: str) -> str:
    folder = Path(os.path.expanduser(path)).parent
    if not folder.is_dir():
        return ""
    near = difflib.get_close_matches(Path(path).name, [entry.name for entry in folder.iterdir()], n=1)
    return f" (there is {str(folder / near[0])!r})" if near else ""


def _no_column(column: str, names: Sequence[str], origin: str, option: str) -> str:
    near = difflib.get_close_matches(column, names, n=1)
    suggestion = repr(near[0]) if near else "the right one"
    return (
        f"found no column {column!r} in {origin!r}, expected it among its columns {', '.join(names)}: "
        f"set data.{option} to {suggestion}"
    )


def _holds_images(feature: Any) -> bool:
    if isinstance(feature, dict):
        return "bytes" in feature or "path" in feature
    return getattr(feature, "dtype", None) in ("string", "large_string", "binary", "large_binary")


def _holds_text(feature: Any) -> bool:
    inner = getattr(feature, "feature", feature)
    if isinstance(feature, list):
        inner = feature[0]
    return getattr(inner, "dtype", None) in ("string", "large_string")


def _holds_labels(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return dtype in ("string", "large_string") or dtype.startswith(("int", "uint"))


def _stamp(file: str) -> str:
    state = os.stat(file)
    return hashlib.sha1(f"{file}\0{state.st_mtime_ns}\0{state.st_size}".encode()).hexdigest()
