"""Rows of reinforced shards: an image and its captions, with the teachers' embeddings.

The layout is that of DataCompDR: the members `txt` (the caption), `syn.json` (synthetic captions), `paug.json`
(augmentations) and `npz` or `pth.gz` (embeddings), in version 1 with one `text_emb` for real and synthetic
captions, in version 2 with one array for each kind of synthetic caption.
"""

from __future__ import annotations

import functools
import gzip
import io
import re
import zipfile
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from ...common.errors import UserError
from ..base.decode import decode_image, read_image
from ..base.faults import BadSample
from ..reading.layout import probed_rows
from ..reading.shards import SeparateImages, Shards
from ..reading.tar import IMAGE_SUFFIXES, caption_of, uid_of

OtherSizes = Literal["rescale", "refuse", "ignore"]
EMBEDDINGS = ("npz", "pth.gz")
MAX_EMBEDDING_BYTES = 2**26
"""Largest size of a sample's embeddings, bytes; 30 embeddings of 1536 dimensions in float32 take 0.2 MB."""


class ReinforcedTable:
    """The samples of reinforced shards.

    Args:
        shards: the tar files.
        separate_images: images outside of the shards; None if the shards contain the images.
        synthetic_keys: regular expression; synthetic captions are used if it matches their whole key.
        other_sizes: treatment of images whose size differs from the recorded size.
        max_pixels: images with more pixels are refused.
    """

    def __init__(
        self,
        shards: Shards,
        separate_images: SeparateImages | None,
        synthetic_keys: str,
        other_sizes: OtherSizes,
        max_pixels: int,
    ) -> None:
        self.shards = shards
        self.separate_images = separate_images
        self.synthetic_keys = re.compile(synthetic_keys)
        self.other_sizes: OtherSizes = other_sizes
        self.max_pixels = max_pixels
        self.teacher_width = 0

    def __len__(self) -> int:
        return len(self.shards)

    def name(self, row: int) -> str:
        """Return shard and key of a row, its name in messages."""
        return self.shards.name(row)

    def image_name(self, row: int) -> str:
        """Return the name of the row, since the image is not a file of its own."""
        return self.name(row)

    def members(self, row: int) -> dict[str, bytes]:
        """Return the members of a row and those of its separate image, whose `json` is returned as `image.json`.

        Raises:
            BadSample: If the members cannot be read.
        """
        members = self.shards.members(row)
        if self.separate_images is not None:
            separate = self.separate_images.members(row, self.shards.key(row).rpartition("/")[2], uid_of(members))
            members |= {("image.json" if kind == "json" else kind): content for kind, content in separate.items()}
        return members

    def image(self, row: int) -> Image.Image:
        """Return the decoded image."""
        return self.decoded(self.members(row), row)

    def decoded(self, members: dict[str, bytes], row: int) -> Image.Image:
        """Decode the image in the members of a row, without EXIF orientation, since boxes are measured without it.

        Raises:
            BadSample: If there is no image, or it cannot be used.
        """
        return decode_image(_image_in(members), None, self.name(row), self.max_pixels, upright=False)

    def encoded(self, row: int) -> bytes:
        """Return the encoded image; raises `BadSample`."""
        return read_image(_image_in(self.members(row)), None, self.name(row))

    def captions(self, row: int) -> list[str]:
        """Return the real caption in a list, which is empty without one; raises `BadSample`."""
        return caption_of(self.members(row))

    def check(self, split: str, width: Callable[[int], int]) -> None:
        """Check that at least one of the probed samples can be used, and set `teacher_width` from it.

        Args:
            split: name of the split, for messages.
            width: returns the dimension of the teachers' embeddings of a row, or raises `BadSample`.

        Raises:
            UserError: If the split is empty, or no probed sample can be used.
        """
        origins = f"{len(self.shards.files)} shard(s), {self.shards.files[0]!r} the first"
        if not len(self):
            raise UserError(f"Expected samples in the {split} split ({origins}), got none: check the path.")
        causes: dict[str, int] = {}
        example = ""
        for row in probed_rows(len(self)):
            try:
                self.teacher_width = width(row)
            except BadSample as bad:
                causes[bad.fault.cause] = causes.get(bad.fault.cause, 0) + 1
                example = example or bad.fault.name
                continue
            return
        what = ", ".join(f"{cause}: {count}" for cause, count in causes.items())
        hint = "" if self.separate_images is not None else ", or set data.images if the images are not in the shards"
        raise UserError(
            f"Expected images with captions and reinforcements in the {split} split ({origins}), got no usable sample "
            f"among {sum(causes.values())} of {len(self)} ({what}; for example {example}): check the shards{hint}."
        )


def _image_in(members: dict[str, bytes]) -> bytes | None:
    return next((content for kind, content in members.items() if f".{kind}" in IMAGE_SUFFIXES), None)


class SampleEmbeddings:
    """Arrays of one sample, of which single rows are read.

    Args:
        members: members of the sample.
        name: name of the sample in messages.

    Raises:
        BadSample: If the sample has no embeddings, or they are no matrices of floats, or take more than
            `MAX_EMBEDDING_BYTES` decompressed.
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
        except Exception:  # zipfile, gzip, numpy and torch raise several kinds of errors for damaged content
            raise BadSample(f"unreadable {kind}", name) from None
        for array in ("image_emb", "text_emb"):
            if array not in self._arrays:
                raise BadSample(f"no {array} in {kind}", name)

    def __contains__(self, array: str) -> bool:
        return array in self._arrays

    def rows(self, array: str) -> int:
        """Return the number of rows of an array."""
        return int(self._arrays[array].shape[0])

    def row(self, array: str, number: int) -> torch.Tensor:
        """Return one row [D] in the stored type.

        Raises:
            BadSample: If the row cannot be read.
        """
        try:
            return self._arrays[array][number]
        except Exception:
            raise BadSample(f"unreadable {array}", self.name) from None


class _NpyRows:
    """Array in an `npz` file; a row is read without the rows after it.

    The rows before it are read and dropped instead of skipped by a seek: Python 3.12.0 to 3.12.8, 3.13.0 and 3.13.1
    read from a wrong position after a seek while another member is open (python/cpython#127847), and every Python from
    3.12 on leaves out the checksum of a member after a seek.
    """

    def __init__(self, archive: zipfile.ZipFile, member: str) -> None:
        self.archive = archive
        self.member = member
        with archive.open(member) as file:
            start = file.read(10)
            length = int.from_bytes(start[8:], "little")
            self.shape, self.dtype = _npy_header(start + file.read(length))
        self.offset = 10 + length

    def __getitem__(self, number: int) -> torch.Tensor:
        bytes_in_row = self.shape[1] * self.dtype.itemsize
        with self.archive.open(self.member) as file:
            file.read(self.offset + range(self.shape[0])[number] * bytes_in_row)
            content = file.read(bytes_in_row)
        row = np.frombuffer(content, self.dtype, count=self.shape[1])
        return torch.from_numpy(row.astype(self.dtype.newbyteorder("=")))


@functools.lru_cache(maxsize=64)  # samples of one dataset have the same few headers
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
        _bounded_zip(content)  # torch's format is a zip file
    arrays = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not all(map(_is_float_matrix, arrays.values())):
        raise ValueError("not rows of floats")
    return {name: array.detach() for name, array in arrays.items()}


def _is_float_matrix(array: object) -> bool:
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
