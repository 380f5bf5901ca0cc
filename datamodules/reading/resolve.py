"""Sources of rows as users name them, and their resolution to a format and files."""

from __future__ import annotations

import argparse
import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from ...common.errors import UserError
from ...common.names import nearest_path
from ...common.ranges import POSITIVE, SettingsGroup
from ...common.urls import keep
from ..base.memory import MemoryRows, in_memory
from ..base.stages import Split
from .published import DataSet, data_set_in
from .remote import find_files, is_remote, suffix_of, without_query
from .tar import IMAGE_SUFFIXES

METADATA = ("metadata.jsonl", "metadata.csv")
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
_BY_URL = {ending: _ENDINGS[ending] for ending in (".parquet", ".tar", ".jsonl", ".ndjson", ".json", ".csv")}
"""Formats that are read by URL; of a folder with several, the first is read."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source(SettingsGroup):
    """A source of rows with options that a path alone cannot express.

    Args:
        path: file, glob pattern, folder, hub name, or URL of a file, pattern or folder, such as `s3://bucket/*.tar`.
        format: format of the files; by default detected from the suffix or the content of the folder.
        split: split of a hub dataset; by default the split of the datamodule ("test" for prediction). For a file with
            Karpathy's splits, "+" joins several; the default for training is "train+restval". Oxford-IIIT Pet has
            "trainval" and "test", Food-101 "train" and "test"; neither has one for validation.
        name: configuration of a hub dataset.
        image_root: folder that relative image paths start from, and that no path may leave; by default the folder in
            the datamodule's settings, or else the folder of the file, which paths may leave.
        image_column: column of the images, if it differs from the datamodule's.
        caption_column: column of the captions, if it differs from the datamodule's.
        image_id_column: column of the image ids, if it differs from the datamodule's.
        weight: number of times that an epoch of training reads each row; a fraction reads some of the rows, drawn
            anew for each epoch. In a streamed source, the number of times that a pass reads each shard.

    Raises:
        UserError: If the weight is not a positive number.
    """

    path: str
    format: Format = "auto"
    split: str | None = None
    name: str | None = None
    image_root: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    image_id_column: str | None = None
    weight: Annotated[float, POSITIVE] = 1.0

    def __post_init__(self) -> None:
        path, image_root = keep([self.path, self.image_root])
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "image_root", image_root)


def as_source(source: Any) -> Source:
    """Convert a source in any form to a `Source`.

    Checkpoints store a dict; jsonargparse passes a namespace for a source in a list that also has paths.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, argparse.Namespace):
        source = vars(source)
    if isinstance(source, dict):
        return Source(**source.get("init_args", source))
    if isinstance(source, MemoryRows):
        raise UserError(
            "Expected a file, a folder or a hub name, got rows in memory, which the datamodules of pairs and labels "
            "read: write them to a file."
        )
    if not isinstance(source, (str, os.PathLike)):
        raise UserError(f"Expected a file, a folder, a hub name or rows, got {type(source).__name__}: convert it.")
    return Source(os.fspath(source))


if TYPE_CHECKING:
    Sources = Any
else:  # as the command line takes them; in Python also rows in memory, as `MemoryRows`
    Sources = str | Source | list[str | Source] | None


Named = str | Source | MemoryRows
"""One source of a split."""


def by_split(train: Sources, validation: Sources, test: Sources, predict: Sources) -> dict[Split, list[Named]]:
    """Return the arguments of a datamodule as lists of sources by split.

    Raises:
        UserError: If a source that is not for training has a weight.
    """
    sources: dict[Split, list[Named]] = {
        "train": _as_list(train),
        "validation": _as_list(validation),
        "test": _as_list(test),
        "predict": _as_list(predict),
    }
    for split, several in sources.items():
        for source in several if split != "train" else ():
            if isinstance(source, Source) and source.weight != 1:
                raise UserError(
                    f"Expected no weight of {source.path!r} in the {split} split, got {source.weight}: remove it, "
                    "since an evaluation reads each image once."
                )
    return sources


def _as_list(sources: Sources) -> list[Named]:
    """Convert sources in any form to a list."""
    if in_memory(sources):
        return [MemoryRows(sources)]
    several = sources if isinstance(sources, (list, tuple)) else [] if sources is None else [sources]
    return [_named(source) for source in several]


def _named(source: Any) -> Named:
    if in_memory(source):
        return MemoryRows(source)
    return keep(source) if isinstance(source, str) else as_source(keep(source))


class Resolved(NamedTuple):
    """Format of a source, its files (none of a hub or a saved dataset), and the folder that image paths start from."""

    format: Format | DataSet
    files: list[str]
    folder: str


def resolve(source: Source) -> Resolved:
    """Find the files of a source on a disk, or on the hub.

    Raises:
        UserError: If the source does not exist, or its format is unknown.
    """
    if is_remote(source.path):
        raise UserError(
            f"Expected a file or a folder on a disk, got {source.path!r}: copy it, since only image-caption pairs, "
            "labeled images and reinforced shards are read by URL."
        )
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        return _resolve_folder(source, path)
    if os.path.isfile(path):
        files = [path]
    elif glob.has_magic(path):
        files = sorted(glob.glob(path, recursive=True))
        if not files:
            raise UserError(f"Expected files that match {source.path!r}, got none: correct the pattern.")
    elif source.format == "hub" or (source.format == "auto" and not _looks_local(path)):
        return Resolved("hub", [], ".")
    else:
        hub = ", or give `format: hub`" if source.format == "auto" and _HUB_NAME.fullmatch(path) else ""
        raise UserError(
            f"Expected a file or a folder, got {source.path!r}, which does not exist: correct the path"
            f"{nearest_path(source.path)}{hub}."
        )
    kind = source.format
    if kind == "auto":
        formats = {_ENDINGS.get(Path(file).suffix.lower()) for file in files}
        if len(formats) > 1 or None in formats:
            endings = sorted({Path(file).suffix for file in files})
            raise UserError(
                f"Expected one suffix among {', '.join(_ENDINGS)} in {source.path!r}, got {endings}: convert the data, "
                "or give `format`."
            )
        kind = formats.pop()  # type: ignore[assignment]
    files = [os.path.abspath(file) for file in files]
    return Resolved(kind, files, os.path.dirname(files[0]))


def resolve_url(source: Source) -> Resolved:
    """Find the files of a source by URL.

    Raises:
        UserError: If there are no files, or the format is not one that is read by URL.
    """
    suffixes = tuple(suffix for suffix, kind in _BY_URL.items() if source.format in ("auto", kind))
    if not suffixes:
        raise UserError(
            f"Expected one of {', '.join(dict.fromkeys(_BY_URL.values()))} as the format of {source.path!r}, got "
            f"{source.format}: convert the data, or copy it to a disk."
        )
    files = find_files(source.path, suffixes)
    formats = {_BY_URL.get(suffix_of(file)) for file in files}
    kind = formats.pop()
    if formats or kind is None:
        endings = sorted({suffix_of(file) for file in files})
        raise UserError(
            f"Expected one suffix among {', '.join(suffixes)} in {source.path!r}, got {endings}: narrow the pattern."
        )
    folder, _, name = without_query(files[0]).rpartition("/")
    return Resolved("imagefolder" if name in METADATA else kind, files, folder)


def _resolve_folder(source: Source, path: str) -> Resolved:
    folder = Path(os.path.abspath(path))
    is_saved = (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()
    if source.format == "disk" or (source.format == "auto" and is_saved):
        return Resolved("disk", [], str(folder))
    if source.format == "auto" and (data_set := data_set_in(folder)):
        return Resolved(data_set, [], str(folder))
    if source.format in ("auto", "imagefolder"):
        for name in METADATA:
            if (folder / name).exists():
                return Resolved("imagefolder", [str(folder / name)], str(folder))
    for kind, endings in (
        ("parquet", (".parquet",)),
        ("webdataset", (".tar",)),
        ("json", (".json", ".jsonl")),
        ("imagefolder", IMAGE_SUFFIXES),
    ):
        if source.format in ("auto", kind):
            files = sorted(str(file) for file in folder.rglob("*") if file.suffix.lower() in endings)
            if files:
                return Resolved(kind, files, str(folder))  # type: ignore[arg-type]
    raise UserError(
        f"Expected Parquet, tar or JSON files, images or {METADATA[0]} in the folder {source.path!r}, got "
        f"{len(list(folder.iterdir()))} other entries: give another folder."
    )


def local_files(source: str, suffix: str) -> list[str]:
    """Return the files of a folder and its subfolders with a suffix, those that match a pattern, or the file itself.

    The paths are sorted; there may be none.
    """
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return sorted(str(file) for file in Path(path).rglob(f"*{suffix}"))
    if os.path.exists(path):
        return [path]
    return sorted(glob.glob(path, recursive=True))


def _looks_local(path: str) -> bool:
    """Return whether a name is a local path and no hub name, by its form or because its folder exists."""
    if path.startswith((".", "/", "~")) or (not _HUB_NAME.fullmatch(path) and "/" in path):
        return True
    return Path(path).suffix.lower() in _ENDINGS or ("/" in path and Path(path).parent.is_dir())
