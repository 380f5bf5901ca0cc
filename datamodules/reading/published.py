"""Forms in which data sets are published: Karpathy's splits of COCO and Flickr30k, Oxford-IIIT Pet, Food-101."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...common.errors import UserError
from ..base.faults import BadSample
from ..base.text_files import ENCODING, parse_json, require_utf8
from .layout import Record, file_record, identity_in, record
from .remote import open_file, suffix_of

# Karpathy's splits, one file each: `dataset_coco.json`, `dataset_flickr30k.json`

# The splits of the literature for each split of the datamodule. Flickr30k has no "restval".
_DEFAULT_SPLITS = {"train": {"train", "restval"}, "validation": {"val"}, "test": {"test"}, "predict": {"test"}}


def is_karpathy(file: str) -> bool:
    """Return whether a JSON file is in Karpathy's form, which is an object; reads the first 100 characters only."""
    if suffix_of(file) != ".json":
        return False
    with open_file(file) as content:
        return content.read(100).decode(ENCODING, errors="replace").lstrip().startswith("{")


def read_karpathy(files: list[str], split: str | None, role: str) -> Iterator[Record]:
    """Yield the records of the images in some splits, each image with all of its captions.

    Args:
        files: JSON files, each an object whose list `images` has objects with `filename`, `split`, `sentences`
            and optionally a folder `filepath`; the id of an image is `cocoid`, or else `imgid`.
        split: names of splits, joined by "+"; None for the splits of the literature.
        role: split of the datamodule.

    Raises:
        UserError: If a file has another form, or lacks a split.
    """
    for file in files:
        images = _images(file)
        splits = {image["split"] for image in images if _is_complete(image)}
        chosen = set(split.split("+")) if split is not None else _DEFAULT_SPLITS[role] - ({"restval"} - splits)
        if missing := chosen - splits:
            raise UserError(
                f"Expected the splits {', '.join(sorted(missing))} in {file!r}, got {', '.join(sorted(splits))}: name "
                "one of them as `split`, or several joined by +."
            )
        for image in images:
            # The split of an incomplete image is unknown: such an image is counted as a bad row of every split.
            if not _is_complete(image) or image["split"] in chosen:
                yield record(lambda image=image: _of_image(image))  # type: ignore[misc]


def _of_image(image: Any) -> Record:
    if not _is_complete(image):
        raise BadSample("incomplete image", "")
    path = os.path.join(image.get("filepath") or "", image["filename"])
    captions = [sentence["raw"] for sentence in image["sentences"]]
    return file_record(path, captions, identity_in(image.get("cocoid", image.get("imgid"))))


def _images(file: str) -> list[Any]:
    with require_utf8(file), open_file(file) as opened:
        content = parse_json(opened.read().decode(ENCODING), file)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        what = f"object with the keys {', '.join(content)}" if isinstance(content, dict) else type(content).__name__
        raise UserError(
            "Expected a list of objects with an image and its caption, or Karpathy's form, an object with a list "
            f"`images`, got a JSON {what} in {file!r}: convert the file."
        )
    if images and not any(map(_is_complete, images)):
        raise UserError(
            "Expected images as objects with `filename`, `split` and `sentences`, each with its `raw` text, got no "
            f"such object in {file!r}: correct the file."
        )
    return images


def _is_complete(image: Any) -> bool:
    try:
        texts = [image["filename"], image["split"], *(sentence["raw"] for sentence in image["sentences"])]
    except (KeyError, TypeError):
        return False
    return all(isinstance(text, str) for text in texts)


# Oxford-IIIT Pet and Food-101, in the folders of their authors' archives, which torchvision extracts to
# `oxford-iiit-pet` and `food-101`: images in one folder, lists of the images of each split beside it

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
    splits = _DATA_SETS[data_set].splits
    name = split or {"train": next(iter(splits)), "validation": "validation"}.get(role, "test")
    if name not in splits:
        raise UserError(
            f"Expected the split {name!r} in {folder!r}, got {', '.join(splits)}: name one of them as `split`."
        )
    return str(Path(folder, splits[name]))


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


def read_authors_list(files: list[str], data_set: DataSet, folder: str) -> Iterator[Record]:
    """Yield the records of the images in a list; the label is the name of the class."""
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
    return file_record(str(images / f"{words[0]}.jpg"), [_breed(words[0])])


def _breed(image: str) -> str:
    return image.rpartition("_")[0].replace("_", " ").title()


def _dish(line: str, images: Path) -> Record:
    """Read a line such as "apple_pie/1005649"."""
    name, _, number = line.partition("/")
    if not number:
        raise BadSample("invalid line", "")
    return file_record(str(images / name / f"{number}.jpg"), [name])
