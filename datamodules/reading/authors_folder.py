"""Labelled images in the folders of their authors' archives: Oxford-IIIT Pet and Food-101.

Images of both are in one folder; lists beside it name the images of each split. torchvision extracts the archives to
`oxford-iiit-pet` and `food-101`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ...common.errors import UserError
from ..base.faults import BadSample
from ..base.text_files import ENCODING, require_utf8
from .record import Record, record

DataSet = Literal["oxford_iiit_pet", "food101"]


@dataclass(frozen=True)
class _Lists:
    """Files of a data set: a list by name of its split, and another file that identifies the folder."""

    splits: dict[str, str]
    mark: str


_DATA_SETS: dict[DataSet, _Lists] = {
    "oxford_iiit_pet": _Lists({"trainval": "annotations/trainval.txt", "test": "annotations/test.txt"}, "images"),
    "food101": _Lists({"train": "meta/train.txt", "test": "meta/test.txt"}, "meta/classes.txt"),
}


def data_set_in(folder: Path) -> DataSet | None:
    """Return the data set whose files a folder contains; None if there is none."""
    for name, lists in _DATA_SETS.items():
        if all((folder / file).exists() for file in (*lists.splits.values(), lists.mark)):
            return name
    return None


def list_of_split(data_set: DataSet, folder: str, split: str | None, role: str) -> str:
    """Return the path of the list of a split.

    Args:
        data_set: the data set.
        folder: its folder.
        split: name of the split; None for the authors' training split in training, and "test" in test and prediction.
        role: split of the datamodule.

    Raises:
        UserError: If there is no such split; the authors have none for validation.
    """
    known = _DATA_SETS[data_set].splits
    wanted = split or {"train": next(iter(known)), "validation": "validation"}.get(role, "test")
    if wanted not in known:
        raise UserError(
            f"Expected the split {wanted!r} in {folder!r}, got {', '.join(known)}: name one of them as `split`."
        )
    return str(Path(folder, known[wanted]))


def class_names(data_set: DataSet, folder: str) -> tuple[str, ...]:
    """Return the names of the classes, in the authors' order.

    Raises:
        UserError: If a list of Oxford-IIIT Pet lacks a class.
    """
    if data_set == "food101":
        return tuple(_lines(Path(folder, _DATA_SETS["food101"].mark)))
    names: dict[int, str] = {}
    for file in _DATA_SETS["oxford_iiit_pet"].splits.values():
        for line in _lines(Path(folder, file)):
            words = line.split()
            if len(words) == 4 and words[1].isdecimal():
                names[int(words[1])] = _breed(words[0])
    if sorted(names) != list(range(1, len(names) + 1)):
        raise UserError(
            f"Expected the classes 1 to {max(names, default=37)} in the lists of {folder!r}, got {len(names)} of them: "
            "extract the archive of the annotations again."
        )
    return tuple(names[number] for number in sorted(names))


def read_authors_list(files: list[str], data_set: DataSet, folder: str, stamp: list[str]) -> Iterator[Record]:
    """Yield the records of the images in a list; the label is the name of the class.

    Args:
        files: the list of a split.
        data_set: the data set.
        folder: its folder.
        stamp: not read; a change of it, with the files, invalidates the cache of the `datasets` library.
    """
    read = _pet if data_set == "oxford_iiit_pet" else _dish
    for file in files:
        for line in _lines(Path(file)):
            yield record(partial(read, line, Path(folder, "images")))


def _lines(file: Path) -> list[str]:
    """Return the lines of a list without comments, which Oxford-IIIT Pet's `list.txt` begins with."""
    with require_utf8(file):
        lines = file.read_text(encoding=ENCODING).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _pet(line: str, images: Path) -> Record:
    """Read a line such as "american_bulldog_100 2 2 1": image, number of the class, species, number of the breed."""
    words = line.split()
    if len(words) != 4:
        raise BadSample("invalid line", "")
    return _labelled(images / f"{words[0]}.jpg", _breed(words[0]))


def _breed(image: str) -> str:
    return image.rpartition("_")[0].replace("_", " ").title()


def _dish(line: str, images: Path) -> Record:
    """Read a line such as "apple_pie/1005649"."""
    name, _, number = line.partition("/")
    if not number:
        raise BadSample("invalid line", "")
    return _labelled(images / name / f"{number}.jpg", name)


def _labelled(image: Path, label: str) -> Record:
    return {"image": {"bytes": None, "path": str(image)}, "caption": [label], "image_id": None}
