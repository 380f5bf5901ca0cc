"""Reading of the teachers' embeddings of one reinforced sample."""

from __future__ import annotations

import functools
import gzip
import io
import zipfile
from typing import Any

import numpy as np
import torch

from ..base.faults import BadSample

EMBEDDINGS = ("npz", "pth.gz")
MAX_EMBEDDING_BYTES = 2**26
"""Largest size of a sample's embeddings, bytes; 30 embeddings of 1536 dimensions in float32 take 0.2 MB."""


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
