"""Rows of an evaluation over all processes: in main memory, or where they are many in a file that a machine shares."""

import os
import socket
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import IO

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...callbacks.distributed.collectives import gather_texts, gather_uneven, rank
from ...common.errors import UserError

IN_MEMORY = 2**27
"""Bytes of a column above which its rows are in files, 128 MiB."""
_BLOCK = 2**24
"""Bytes of the rows of a process that are read and sent at a time, 16 MiB."""


class CollectedRows:
    """Rows of a column, in batches, of which a process has at most about `IN_MEMORY` bytes in main memory."""

    def __init__(self) -> None:
        self._written: list[_RowFile] = []
        self._held: list[Tensor] = []
        self._bytes = 0

    def add(self, batch: Tensor) -> None:
        """Add a batch [B, ...] on the CPU; all have one type, and shapes that differ in the width at most."""
        self._held.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > IN_MEMORY:
            self._write()

    @property
    def width(self) -> int:
        """The largest width of the batches [B, W]; 0 without any."""
        return max((part.shape[1] for part in self._parts), default=0)

    @property
    def _parts(self) -> list["Tensor | _RowFile"]:
        return [*self._written, *self._held]

    def gathered(self, none: Tensor) -> Tensor:
        """Return the rows of all processes, those of rank 0 first; every process must call this.

        Args:
            none: a tensor without rows [0, ...] of the type and the shape of the result; less width is padded with 0.

        Raises:
            UserError: If there is no room for the file of many rows.
        """
        if self._written:
            self._write()
        rows = sum(len(part) for part in self._parts)
        counts = gather_uneven(torch.tensor([rows])).tolist()
        row_bytes = none.element_size() * none.shape[1:].numel()
        size = max(_BLOCK // max(row_bytes, 1), 1)
        blocks = _blocks(self._parts, none, size)
        if sum(counts) * row_bytes <= IN_MEMORY:
            return gather_uneven(torch.cat([none, *blocks]))
        if len(counts) > 1:
            return _shared(blocks, none, counts, size)
        if len(self._written) == 1 and self._written[0].holds(none):
            return self._written[0].mapped()
        whole = _RowFile(none)
        for block in blocks:
            whole.append(block)
        return whole.mapped()

    def _write(self) -> None:
        for batch in self._held:
            if not self._written or not self._written[-1].holds(batch):
                self._written.append(_RowFile(batch[:0]))
            self._written[-1].append(batch)
        self._held = []
        self._bytes = 0


class _RowFile:
    """Rows in a temporary file, which has no name.

    Args:
        none: a tensor without rows [0, ...], of their type and shape.
    """

    def __init__(self, none: Tensor) -> None:
        self._none = none
        self._rows = 0
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="vlightning-")  # noqa: SIM115 (closed with the object)
        self._row_bytes = none.element_size() * none.shape[1:].numel()

    def __len__(self) -> int:
        return self._rows

    @property
    def shape(self) -> torch.Size:
        """Shape of all rows."""
        return torch.Size([self._rows, *self._none.shape[1:]])

    def holds(self, rows: Tensor) -> bool:
        """Return whether rows are of the type and the shape of these."""
        return (rows.dtype, rows.shape[1:]) == (self._none.dtype, self._none.shape[1:])

    def append(self, rows: Tensor) -> None:
        """Write further rows."""
        self._file.seek(0, os.SEEK_END)
        _write(self._file, rows)
        self._rows += len(rows)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self._rows)
        self._file.seek(start * self._row_bytes)
        content = bytearray(self._file.read((stop - start) * self._row_bytes))
        return torch.frombuffer(content, dtype=self._none.dtype).view(stop - start, *self._none.shape[1:])

    def mapped(self) -> Tensor:
        """Return all rows, which are read where they are used."""
        self._file.flush()
        return _mapped(self._file, self._none, self._rows)


def _blocks(parts: Sequence[Tensor | _RowFile], none: Tensor, size: int) -> Iterator[Tensor]:
    """Yield rows in blocks of one size, padded to a width; the last may be smaller."""
    waiting = none
    for part in parts:
        for start in range(0, len(part), size):
            rows = part[start : start + size]
            missing = none.shape[1] - rows.shape[1] if rows.ndim == 2 else 0
            waiting = torch.cat([waiting, pad(rows, (0, missing)) if missing else rows])
            if len(waiting) >= size:
                yield waiting[:size]
                waiting = waiting[size:]
    if len(waiting):
        yield waiting


def _shared(blocks: Iterator[Tensor], none: Tensor, counts: Sequence[int], size: int) -> Tensor:
    """Return the rows of all processes, mapped from a file that the first process of each machine writes."""
    machine = f"{socket.gethostname()} {uuid.getnode()}"
    writer = gather_texts([machine]).index(machine)
    writes = writer == rank()
    row_bytes = none.element_size() * none.shape[1:].numel()
    path = gather_texts([_new_file(sum(counts) * row_bytes) if writes else ""])[writer]
    starts = accumulate(counts, initial=0)
    ends = [start * row_bytes for start in starts]  # of what is written of each process
    with open(path, "r+b") as file:
        for first in range(0, max(counts), size):
            rows = gather_uneven(next(blocks, none))
            of_process = rows.split([min(max(count - first, 0), size) for count in counts])
            for process, block in enumerate(of_process if writes else ()):
                file.seek(ends[process])
                ends[process] += _write(file, block)
        file.flush()
        gather_texts([])  # all is written
        whole = _mapped(file, none, sum(counts))
    gather_texts([])  # and mapped by all
    if writes:
        os.remove(path)
    return whole


def _new_file(size: int) -> str:
    """Return the path of a temporary file of some bytes."""
    descriptor, path = tempfile.mkstemp(prefix="vlightning-")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.remove(path)
        raise UserError(
            f"Expected room for {size:,} bytes of features in {tempfile.gettempdir()!r}, got an error ({error}): set "
            "TMPDIR to a folder with more room."
        ) from error
    finally:
        os.close(descriptor)
    return path


def _write(file: IO[bytes], rows: Tensor) -> int:
    """Write rows; return the number of bytes."""
    return file.write(rows.contiguous().numpy().data) if len(rows) else 0


def _mapped(file: IO[bytes], none: Tensor, rows: int) -> Tensor:
    shape = (rows, *none.shape[1:])
    # Changes stay in this process.
    return torch.from_numpy(np.memmap(file, none.numpy().dtype, "c", shape=shape))
