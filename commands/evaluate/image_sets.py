"""Sets in DataComp's layout: a folder with class names, prompts, and labeled images in tar files.

wds_vtab-pets_test/
  classnames.txt                              one name a line
  zeroshot_classification_templates.txt       one prompt a line, with `{c}` or `{}` where the name goes
  test/nshards.txt                            the number of tar files
  test/0.tar, 1.tar, ...                      <key>.jpg, <key>.cls and, in some sets, <key>.npy
  train/...                                   likewise; only linear probes and nearest neighbours read it
"""

import io
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...common.errors import UserError
from ...datamodules.base.decode import decode_image
from ...datamodules.base.faults import BadSample, reading
from ...datamodules.base.samples import Transform
from ...datamodules.reading.cache import index_cache
from ...datamodules.reading.tar import IMAGE_SUFFIXES, read_members, tar_index
from .encoding import Sample

NAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"


class Prompts(NamedTuple):
    """Class names and templates, with `{}` where a name goes."""

    names: list[str]
    templates: list[str]


def read_prompts(folder: Path) -> Prompts:
    """Read the class names and the templates of a set.

    Raises:
        UserError: If a file is missing or empty, or a template has no place for the name.
    """
    return Prompts(read_lines(folder / NAMES), with_braces(read_lines(folder / TEMPLATES), str(folder / TEMPLATES)))


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file without the empty lines at its end.

    Raises:
        UserError: If there is no such file, it is empty, or it is not UTF-8.
    """
    try:
        lines = file.read_text(encoding="utf-8").rstrip().splitlines()
    except FileNotFoundError:
        raise UserError(f"Expected the file {str(file)!r}, got none: get the set again.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"Expected UTF-8 text in {str(file)!r}, got {error}: get the set again.") from None
    if not lines or "" in (line.strip() for line in lines):
        raise UserError(f"Expected one text a line in {str(file)!r}, got an empty line: correct the file.")
    return [line.strip() for line in lines]


def texts_or_lines(words: list[str]) -> list[str]:
    """Return the words of an option: texts, or the lines of the one text file that they name.

    Raises:
        UserError: If there is no such file.
    """
    if len(words) == 1 and words[0].endswith(".txt"):
        if not (file := Path(words[0]).expanduser()).is_file():
            raise UserError(f"Expected a text file, got {words[0]!r}, which does not exist: correct the path.")
        return read_lines(file)
    return words


def with_braces(templates: list[str], source: str) -> list[str]:
    """Return templates with `{}` in place of DataComp's `{c}`.

    Raises:
        UserError: If a template has no such place, or several.
    """
    converted = [template.replace("{c}", "{}") for template in templates]
    if wrong := next((template for template in converted if template.count("{}") != 1), None):
        raise UserError(f"Expected one {{}} or {{c}} in each template of {source}, got {wrong!r}: correct it.")
    return converted


class ImageSet(torch.utils.data.Dataset[Sample]):
    """The labeled images of one split.

    A sample has a label, and `metadata`, float64 [M], the numbers of the `.npy` file, of which there may be none.

    Raises:
        UserError: If the split has no tar files, or a file cannot be read.
    """

    def __init__(self, folder: Path, split: str, transform: Transform, classes: int) -> None:
        self.transform = transform
        self.classes = classes
        self.files = _tars(folder / split)
        self.indexes = [tar_index(file, index_cache(None)) for file in self.files]
        self.starts = np.cumsum([0, *(len(index.keys) for index in self.indexes)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, number: int) -> Sample:
        """Return a sample; raises `BadSample` if it cannot be used."""
        file_number = int(np.searchsorted(self.starts, number, side="right")) - 1
        file = self.files[file_number]
        index = self.indexes[file_number]
        row = number - int(self.starts[file_number])
        key = index.keys[row]
        name = f"{file}, {os.fsdecode(key)}"
        members = read_members(file, int(index.start[row]), int(index.stop[row]), name, key)
        with reading(name):
            label = int(members["cls"].decode()) if "cls" in members else -1
            metadata = _numbers(members["npy"]) if "npy" in members else np.zeros(0)
        if "cls" in members and not 0 <= label < self.classes:
            raise BadSample("label outside the classes", name)
        if "cls" not in members and not metadata.size:
            raise BadSample("no label", name)
        data = next((content for kind, content in members.items() if f".{kind}" in IMAGE_SUFFIXES), None)
        image = self.transform(decode_image(data, None, name))
        return Sample(image, label, metadata)


def _tars(folder: Path) -> list[str]:
    """Return the tar files of a split in the order of their numbers."""
    paths = sorted(folder.glob("*.tar"), key=lambda file: (len(file.stem), file.stem))
    if not paths:
        raise UserError(f"Expected the tar files of a set in {str(folder)!r}, got none: get the set again.")
    count_file = folder / "nshards.txt"
    count = count_file.read_text().strip() if count_file.is_file() else str(len(paths))
    if count != str(len(paths)):
        raise UserError(
            f"Expected {count} tar files in {str(folder)!r}, as nshards.txt says, got {len(paths)}: get the set again."
        )
    return [str(file.absolute()) for file in paths]


def _numbers(content: bytes) -> np.ndarray:
    """Return the numbers of a `.npy` file, without the pickles that such a file may hold."""
    return np.load(io.BytesIO(content), allow_pickle=False).astype(np.float64).ravel()


def is_complete(folder: Path) -> bool:
    """Return whether a folder has the files of a set, in the number that `nshards.txt` says."""
    count = folder / "test/nshards.txt"
    if not all(file.is_file() for file in (folder / NAMES, folder / TEMPLATES, count)):
        return False
    return count.read_text().strip() == str(len(list(count.parent.glob("*.tar"))))
