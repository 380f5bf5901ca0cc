"""Rows of a reinforced data set: an image and its captions, with what a teacher said of them.

The layouts are the vendor's (DataCompDR): the members ``txt`` (the caption), ``syn.json`` (synthetic captions),
``paug.json`` (augmentations) and ``npz`` or ``pth.gz`` (embeddings), in version 1 with one ``text_emb`` for real and
synthetic captions, in version 2 with one array for each kind of synthetic caption.
"""

from __future__ import annotations

import functools
import gzip
import io
import re
import zipfile
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from ..core.decode import EMPTY_CAPTION, BadSample, Fault, decode_image, reading
from ..text.tokenizers import is_text, usable_caption
from ..transforms.clip import ReplayTransform
from ..transforms.replay import Augmentation, Box, augmentation_entries, parse_augmentation
from .records import IMAGE_SUFFIXES, TEXT_KEYS
from .table import PROBED_ROWS
from .tar import BesideShards, Shards, json_of, uid_of

REINFORCEMENTS = ("paug.json", "syn.json")
EMBEDDINGS = ("npz", "pth.gz")
RESCALED = "box rescaled"
MAX_EMBEDDING_BYTES = 2**26  # of a sample; those of 30 augmentations, 1536 wide in float32, are 0.2 MB
OtherSizes = Literal["rescale", "refuse", "ignore"]


class Embeddings:
    """The arrays of one sample, of which single rows are read.

    Args:
        members: of the sample.
        name: what messages call it.

    Raises:
        BadSample: there are none, they are of another form, or they unpack to more than :data:`MAX_EMBEDDING_BYTES`.
    """

    def __init__(self, members: dict[str, bytes], name: str) -> None:
        kind = next((kind for kind in EMBEDDINGS if kind in members), None)
        if kind is None:
            raise BadSample(f"no member {' or '.join(EMBEDDINGS)}", name)
        self.name = name
        try:
            self._arrays: dict[str, _NpyRows | torch.Tensor] = (
                _npz_arrays(members[kind]) if kind == "npz" else _torch_arrays(members[kind])
            )
        except Exception:  # zipfile, gzip, numpy and torch each have several errors for damaged or foreign content
            raise BadSample(f"unreadable {kind}", name) from None
        for array in ("image_emb", "text_emb"):
            if array not in self._arrays:
                raise BadSample(f"no {array} in {kind}", name)

    def __contains__(self, array: str) -> bool:
        return array in self._arrays

    def rows(self, array: str) -> int:
        """How many rows an array has."""
        return int(self._arrays[array].shape[0])

    def row(self, array: str, number: int) -> torch.Tensor:
        """One row, as it is stored."""
        try:
            return self._arrays[array][number]
        except Exception:
            raise BadSample(f"unreadable {array}", self.name) from None


class _NpyRows:
    """An array inside an ``npz`` file; a row is read without those after it."""

    def __init__(self, archive: zipfile.ZipFile, member: str) -> None:
        self.file = archive.open(member)
        start = self.file.read(10)
        length = int.from_bytes(start[8:], "little")
        self.shape, self.dtype = _npy_header(start + self.file.read(length))
        self.offset = 10 + length

    def __getitem__(self, number: int) -> torch.Tensor:
        bytes_in_row = self.shape[1] * self.dtype.itemsize
        self.file.seek(self.offset + range(self.shape[0])[number] * bytes_in_row)
        row = np.frombuffer(self.file.read(bytes_in_row), self.dtype, count=self.shape[1])
        return torch.from_numpy(row.astype(self.dtype.newbyteorder("=")))


@functools.lru_cache(maxsize=64)  # samples of one data set have the same few headers
def _npy_header(header: bytes) -> tuple[tuple[int, int], np.dtype[Any]]:
    file = io.BytesIO(header)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("a header of another version")
    shape, columns_first, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 2 or columns_first or dtype.kind != "f":
        raise ValueError("not rows of floats")
    return shape, dtype


def _npz_arrays(data: bytes) -> dict[str, Any]:
    archive = _bounded_zip(data)
    return {name.removesuffix(".npy"): _NpyRows(archive, name) for name in archive.namelist() if name.endswith(".npy")}


def _torch_arrays(data: bytes) -> dict[str, Any]:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        content = packed.read(MAX_EMBEDDING_BYTES + 1)
    if len(content) > MAX_EMBEDDING_BYTES:
        raise ValueError("too large")
    if zipfile.is_zipfile(io.BytesIO(content)):
        _bounded_zip(content)  # what torch writes is packed a second time if somebody wants it so
    arrays = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not all(map(_has_rows, arrays.values())):
        raise ValueError("not rows of floats")
    return {name: array.detach() for name, array in arrays.items()}


def _has_rows(array: object) -> bool:
    return (
        isinstance(array, torch.Tensor)
        and array.dim() == 2
        and array.is_floating_point()
        and array.layout == torch.strided
        and array.device.type == "cpu"
    )


def _bounded_zip(data: bytes) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(io.BytesIO(data))
    if sum(member.file_size for member in archive.infolist()) > MAX_EMBEDDING_BYTES:
        raise ValueError("too large")
    return archive


class ReinforcedSample(NamedTuple):
    """One augmented image with a real and a synthetic caption, and the teachers' embeddings [D] of the three."""

    image: torch.Tensor
    caption: str
    synthetic: str
    teacher_image: torch.Tensor
    teacher_text: torch.Tensor
    teacher_synthetic: torch.Tensor
    sample_index: int
    notes: list[Fault]


class ReinforcedTable:
    """The samples of reinforced shards.

    Args:
        shards: the tar files.
        beside: the images, where they are not in the shards.
        synthetic_keys: pattern that the names of the synthetic captions to use match as a whole.
        other_sizes: what to do with images of another size than the recorded one.
        max_pixels: larger images are refused.
    """

    def __init__(
        self,
        shards: Shards,
        beside: BesideShards | None,
        synthetic_keys: str,
        other_sizes: OtherSizes,
        max_pixels: int,
    ) -> None:
        self.shards = shards
        self.beside = beside
        self.synthetic_keys = re.compile(synthetic_keys)
        self.other_sizes: OtherSizes = other_sizes
        self.max_pixels = max_pixels
        self.teacher_width = 0

    def __len__(self) -> int:
        return len(self.shards)

    def name(self, row: int) -> str:
        """Shard and key of a row."""
        return self.shards.name(row)

    def picture_name(self, row: int) -> str:
        """The same: images are inside files."""
        return self.name(row)

    def members(self, row: int) -> dict[str, bytes]:
        """The members of a row and those beside it; the latter's ``json`` as ``image.json``."""
        members = self.shards.members(row)
        if self.beside is not None:
            found = self.beside.members(row, self.shards.key(row).rpartition("/")[2], uid_of(members))
            members |= {("image.json" if kind == "json" else kind): content for kind, content in found.items()}
        return members

    def image(self, row: int) -> Image.Image:
        """The decoded image."""
        return self.decoded(self.members(row), row)

    def decoded(self, members: dict[str, bytes], row: int) -> Image.Image:
        """The image of a row's members, as it is stored: boxes were measured before anybody turned it.

        Raises:
            BadSample: there is none, or it cannot be used.
        """
        data = next((content for kind, content in members.items() if f".{kind}" in IMAGE_SUFFIXES), None)
        return decode_image(data, None, self.name(row), self.max_pixels, upright=False)

    def check(self, split: str, read: ReinforcedReader) -> None:
        """Read some samples, fail where none can be used, and learn the width of the teachers' embeddings.

        Raises:
            ValueError: naming what was found.
        """
        origins = f"{len(self.shards.files)} shard(s), {self.shards.files[0]!r} the first"
        if not len(self):
            raise ValueError(f"found no samples in the {split} split ({origins}), expected some: check the path")
        causes: dict[str, int] = {}
        example = ""
        for row in np.unique(np.linspace(0, len(self) - 1, PROBED_ROWS).astype(int)).tolist():
            try:
                self.teacher_width = len(read(row, (0, 0)).teacher_image)
            except BadSample as bad:
                causes[bad.fault.cause] = causes.get(bad.fault.cause, 0) + 1
                example = example or bad.fault.name
                continue
            return
        what = ", ".join(f"{cause}: {count}" for cause, count in causes.items())
        hint = "" if self.beside is not None else ", or data.images where they are not in the shards"
        raise ValueError(
            f"found no usable sample among {sum(causes.values())} of the {len(self)} in the {split} split ({origins}; "
            f"{what}; for example {example}), expected an image{hint}, its caption and its reinforcements: check the "
            "shards"
        )


@dataclass
class ReinforcedReader:
    """Reads a row as one of its augmentations, with its caption and one of the synthetic ones."""

    rows: ReinforcedTable
    transform: ReplayTransform

    def __call__(self, row: int, words: tuple[int, int]) -> ReinforcedSample:
        """Read a row with the draws of `sample_words`; raises :class:`BadSample`."""
        name = self.rows.name(row)
        with reading(name):  # the transform too, which carries out what the row says
            return self._read(row, words, name)

    def _read(self, row: int, words: tuple[int, int], name: str) -> ReinforcedSample:
        members = self.rows.members(row)
        captions = [caption for caption in caption_of(members) if usable_caption(caption, False, 0)]
        if not captions:
            raise BadSample(EMPTY_CAPTION, name)
        for kind in REINFORCEMENTS:
            if kind not in members:
                raise BadSample(f"no member {kind}", name)
        embeddings = Embeddings(members, name)
        record = json_of(members, "paug.json")
        entries = self._entries(record, embeddings, name)
        synthetic = self._synthetic(members, embeddings, name)
        number = (words[0] >> 32) % len(entries)
        group = synthetic[(words[0] & 0xFFFFFFFF) % len(synthetic)]
        place = words[1] % len(group.captions)
        teacher_image = embeddings.row("image_emb", number)
        teacher_text = embeddings.row("text_emb", 0)
        teacher_synthetic = embeddings.row(group.array, group.first + place)
        if not is_text(group.captions[place]):
            raise BadSample("lone surrogate in the caption", name)
        self._check_rows([teacher_image, teacher_text, teacher_synthetic], name)
        image = self.rows.decoded(members, row)
        augmentation, notes = self._fitted(entries, number, record, image, members, name)
        return ReinforcedSample(
            self.transform(image, augmentation),
            captions[0],
            group.captions[place],
            teacher_image,
            teacher_text,
            teacher_synthetic,
            row,
            notes,
        )

    def _entries(self, record: dict[str, object], embeddings: Embeddings, name: str) -> list[Any]:
        try:
            entries = augmentation_entries(record.get("param_aug"))
        except (ValueError, RecursionError):
            raise BadSample("unreadable paug.json", name) from None
        if len(entries) != embeddings.rows("image_emb"):
            raise BadSample("param_aug and image_emb differ in number", name)
        return entries

    def _synthetic(self, members: dict[str, bytes], embeddings: Embeddings, name: str) -> list[_Synthetic]:
        groups = []
        kinds = json_of(members, "syn.json")
        if sum(f"{key}_emb" not in embeddings for key in kinds) > 1:
            raise BadSample("no embeddings for each kind of synthetic caption", name)
        for key, value in kinds.items():
            if not self.rows.synthetic_keys.fullmatch(key) or not isinstance(value, list):
                continue
            captions = [text for text in value if isinstance(text, str)]
            own = f"{key}_emb"  # version 2
            array, first = (own, 0) if own in embeddings else ("text_emb", embeddings.rows("text_emb") - len(captions))
            if len(captions) != len(value) or embeddings.rows(array) < len(captions) or (array != own and first < 1):
                raise BadSample("no embedding for each synthetic caption", name)
            groups.append(_Synthetic(captions, array, first))
        groups = [group for group in groups if group.captions]
        if not groups:
            raise BadSample("no synthetic caption", name)
        return groups

    def _check_rows(self, rows: list[torch.Tensor], name: str) -> None:
        width = self.rows.teacher_width or len(rows[0])
        for row in rows:
            if len(row) != width:
                raise BadSample(f"embedding {len(row)} wide instead of {width}", name)
            if not row.isfinite().all():
                raise BadSample("non-finite embedding", name)

    def _fitted(
        self,
        entries: list[Any],
        number: int,
        record: dict[str, object],
        image: Image.Image,
        members: dict[str, bytes],
        name: str,
    ) -> tuple[Augmentation, list[Fault]]:
        """The augmentation with its box in pixels of this copy of the image."""
        actual = (image.height, image.width)
        try:
            chosen = parse_augmentation(entries[number])
            boxes = [Box(*box) for box, _ in entries]
            fit = all(box.fits(*actual) for box in boxes)
        except (TypeError, ValueError, RecursionError):
            raise BadSample("unreadable paug.json", name) from None
        recorded = None
        if self.rows.other_sizes != "ignore":
            # Else whoever downloaded the image may have noted what it was before it was made smaller.
            records = (record, json_of(members, "image.json"), json_of(members, "json"))
            recorded = next((size for size in map(_size_in, records) if size is not None), None)
        if recorded is not None and min(recorded) < 1:
            raise BadSample("original size not positive", name)
        if recorded is None or recorded == actual:
            if not fit:
                raise BadSample("box outside the image", name)
            return chosen, []
        if self.rows.other_sizes == "refuse":
            raise BadSample("another size than recorded", name)
        return chosen._replace(box=chosen.box.rescaled(recorded, actual)), [Fault(RESCALED, name)]


class _Synthetic(NamedTuple):
    """Synthetic captions of one kind, and where their embeddings are."""

    captions: list[str]
    array: str
    first: int


def caption_of(members: dict[str, bytes]) -> list[str]:
    """The real caption, in a list; empty where there is none."""
    data = next((members[kind] for kind in TEXT_KEYS if kind in members), None)
    return [] if data is None else [data.decode("utf-8", errors="replace")]


def _size_in(record: dict[str, object]) -> tuple[int, int] | None:
    """Height and width that a record gives as those of the image in its original size."""
    height, width = record.get("original_height"), record.get("original_width")
    return (height, width) if type(height) is int and type(width) is int else None  # True is no height
