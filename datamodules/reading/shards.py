"""Random access to the samples of tar shards."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import UserError
from ...common.urls import keep
from ..base.decode import read_regular
from .remote import find_files, is_remote, open_file
from .resolve import local_files
from .tar import read_members, tar_indexes, tar_uids

MANIFEST = "manifest.json"
"""Name of the file that `ReinforcementWriter` writes beside the shards."""


def find_shards(sources: Sequence[str]) -> list[str]:
    """Return the paths or URLs of the tar files in files, glob patterns and folders, in the order of the sources.

    Raises:
        UserError: If a source has no tar file.
    """
    files: list[str] = []
    for source in sources:
        if is_remote(source):
            files += find_files(keep(source), (".tar",))
            continue
        matches = local_files(source, ".tar")
        if not matches or not all(os.path.isfile(file) for file in matches):
            raise UserError(f"Expected tar files in {source!r}, got none: correct the path or the pattern.")
        files += [os.path.abspath(file) for file in matches]
    return files


def teachers_of(shards: Sequence[str]) -> dict[str, Any] | None:
    """Return the teachers of reinforced shards, from `manifest.json` in their folders.

    Returns:
        Embedding dimension (`dims`) and logit scale (`scales`) of each teacher, and the path of the manifest
        (`source`); None without a manifest.

    Raises:
        UserError: If a manifest cannot be read, or the teachers of several manifests differ.
    """
    manifests: list[dict[str, Any]] = []
    for path in dict.fromkeys(os.path.join(os.path.dirname(shard), MANIFEST) for shard in shards):
        try:
            with open_file(path) as content:
                text = content.read()
        except (FileNotFoundError, IsADirectoryError):
            continue
        try:
            teachers = json.loads(text)["teachers"]
            dims = [int(teacher["width"]) for teacher in teachers]
            scales = [float(teacher["scale"]) for teacher in teachers]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"Expected width and scale of each teacher in {path!r}, got another content ({error}): restore "
                "the file, or remove it and set widths and scales of the teachers in the model."
            ) from None
        manifests.append({"dims": dims, "scales": scales, "source": repr(path)})
        if (dims, scales) != (manifests[0]["dims"], manifests[0]["scales"]):
            raise UserError(
                f"Expected the same teachers in all shards, got widths {manifests[0]['dims']} and scales "
                f"{manifests[0]['scales']} in {manifests[0]['source']}, but widths {dims} and scales {scales} in "
                f"{path!r}: train on shards that the same teachers reinforced."
            )
    return manifests[0] if manifests else None


class Shards:
    """Samples of concatenated tar files."""

    def __init__(self, files: Sequence[str], cache: Path) -> None:
        self.files = list(files)
        self.indexes = tar_indexes(self.files, cache)
        self._offsets = np.cumsum([0, *(len(index.start) for index in self.indexes)])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the index of the shard of a sample, and the index of the sample in that shard."""
        shard = int(np.searchsorted(self._offsets, sample, side="right")) - 1
        return shard, sample - int(self._offsets[shard])

    def key(self, sample: int) -> str:
        """Return the key of a sample, the prefix of the names of its members."""
        shard, row = self.locate(sample)
        return os.fsdecode(bytes(self.indexes[shard].keys[row]))

    def name(self, sample: int) -> str:
        """Return the name of a sample in messages."""
        return f"{self.files[self.locate(sample)[0]]}, {self.key(sample)}"

    def members(self, sample: int) -> dict[str, bytes]:
        """Read the members of a sample by kind.

        Raises:
            BadSample: If the shard has changed, or cannot be read.
        """
        shard, row = self.locate(sample)
        index = self.indexes[shard]
        span = int(index.start[row]), int(index.stop[row])
        return read_members(self.files[shard], *span, self.name(sample), bytes(index.keys[row]))


class SeparateImages:
    """Images that are not in the shards: in tar files with the names of the shards, or in files.

    An image belongs to the sample with the same key, or to the sample whose `uid` is the key of the image. A `uid` that
    leaves the folder has no image.

    Args:
        folder: folder of tar files with the names of the shards, or of files `<key>.jpg` or `<shard>/<key>.jpg`.
        shards: the shards.
        cache: folder of the cached indexes.
        suffixes: possible suffixes of images.

    Raises:
        UserError: If the folder does not exist, or has tar files for some of the shards only.
    """

    def __init__(self, folder: str, shards: Shards, cache: Path, suffixes: Sequence[str]) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(folder)))
        if not self.folder.is_dir():
            raise UserError(f"Expected the folder of the images, got {folder!r}: correct data.images.")
        self.shards = shards
        self.suffixes = suffixes
        self.cache = cache
        tars = {file.name: str(file) for file in sorted(self.folder.rglob("*.tar"))}
        names = [Path(file).name for file in shards.files]
        missing = [name for name in names if name not in tars]
        self.tars: list[Shards] | None = None
        if tars and missing:
            raise UserError(
                f"Expected a tar file of images in {folder!r} for each of {len(names)} shards, got none for "
                f"{missing[0]!r}: add it, or name only shards with images in data.train."
            )
        if tars:
            self.tars = [Shards([tars[name]], cache) for name in names]
            self._image_indices = [self._image_index(number, images) for number, images in enumerate(self.tars)]

    def _image_index(self, number: int, images: Shards) -> np.ndarray:
        """Return the index of each sample's image in the tar file of the images; -1 for samples without an image."""
        keys = self.shards.indexes[number].keys
        index = _lookup(keys, images.indexes[0].keys)
        if len(keys) and (index < 0).all():
            # Keys that number the samples of each file are unrelated.
            uids = tar_uids(self.shards.files[number], self.shards.indexes[number], self.cache)
            others = tar_uids(images.files[0], images.indexes[0], self.cache)
            index = np.where(uids == b"", -1, _lookup(uids, others))
        return index

    def members(self, sample: int, key: str, uid: str) -> dict[str, bytes]:
        """Read the members of the image of a sample with a key, without folders, and a `uid`, which may be empty.

        Raises:
            BadSample: If the image cannot be read.
        """
        shard, row = self.shards.locate(sample)
        if self.tars is not None:
            image_row = int(self._image_indices[shard][row])
            return self.tars[shard].members(image_row) if image_row >= 0 else {}
        stem = Path(self.shards.files[shard]).stem
        for name in dict.fromkeys(name for name in (key, uid) if name):
            # Downloaded shards may contain any name, such as "../../home/me/photo" or an absolute path.
            if not Path(os.path.normpath(self.folder / name)).is_relative_to(self.folder) or ".." in Path(name).parts:
                continue
            for base in (self.folder / name, self.folder / stem / name):
                for suffix in self.suffixes:
                    if (image := base.parent / f"{base.name}{suffix}").is_file():
                        kinds = {suffix.removeprefix("."): image}
                        kinds |= {kind: base.parent / f"{base.name}.{kind}" for kind in ("txt", "json")}
                        return {kind: read_regular(file, str(file)) for kind, file in kinds.items() if file.is_file()}
        return {}


def _lookup(keys: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the index of each key among the present keys, -1 for missing keys."""
    if not len(present) or not len(keys):
        return np.full(len(keys), -1)
    order = np.argsort(present, kind="stable")
    at = np.minimum(np.searchsorted(present, keys, sorter=order), len(present) - 1)
    index = order[at]
    return np.where(present[index] == keys, index, -1)
