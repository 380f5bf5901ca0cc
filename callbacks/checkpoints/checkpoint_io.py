"""Checkpoints that are written atomically, if asked for while the training goes on."""

import copy
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.files import REPLACED, check_free, original_path, replacing, writing
from .sharded_checkpoint import (
    METADATA,
    divide_checkpoint,
    map_values,
    read_checkpoint_folder,
    read_metadata,
    shard_file,
)

_WAITING = 1
"""Writes that may wait when another one is asked for: a validation writes the best and the last checkpoint."""


class BackgroundWriter:
    """Runs jobs one after the other in a thread.

    An error of a job is raised by the next call of a method, in the calling thread.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None

    def ready(self) -> None:
        """Wait until at most one job is unfinished, so that few copies of a checkpoint are in memory."""
        self._finish(_WAITING)

    def submit(self, job: Callable[[], None], even_after_error: bool = True) -> None:
        """Run a job after those before it; after an error of one of those, only if it is allowed."""
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoints")
        self._jobs.append(self._thread.submit(self._run, job, even_after_error))

    def wait(self) -> None:
        """Wait until all jobs are done, and end the thread."""
        try:
            self._finish(0)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None

    def _finish(self, left: int) -> None:
        while len(self._jobs) > left:
            self._jobs.pop(0).result()
        self._jobs = [job for job in self._jobs if not job.done()]
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None], even_after_error: bool) -> None:
        if self._error is not None and not even_after_error:
            return
        try:
            job()
        except BaseException as error:
            self._error = self._error or error


def snapshot(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a checkpoint in main memory, in which tied tensors stay tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(path: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    whole: dict[str, Any] = map_values(copied, checkpoint)
    return whole


class CheckpointError(UserError, RuntimeError):
    """Raised for a checkpoint that cannot be read."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint to a file beside its target and rename it into place.

    Lightning stages its file in the system's temporary folder; if that is on another file system than the target, the
    move is a copy onto the final name, and a full disk destroys the good checkpoint of that name. Here the old file
    stays until the new one is completely on disk. Remote paths are written by Lightning.

    Loading takes plain data only (`weights_only=True`) unless the Trainer's `weights_only` is set, and also accepts the
    folders that `ShardedStrategy` writes.

    With `asynchronous`, the training goes on while a checkpoint is written: saving copies the checkpoint to main memory
    and returns, and a thread of rank 0 writes and renames as above. An error of the writing is raised at the next save
    or at the end of the run. The end of a run, a stop by a signal, and loading wait for the writing. A checkpoint that
    a new one replaces, such as the best one, is removed when the new one is complete, so a run that is killed meanwhile
    leaves the old one. Main memory must hold two copies of the checkpoint.

    Pass it to the Trainer: `Trainer(plugins=[AtomicCheckpointIO()])`.

    Args:
        asynchronous: Whether the training goes on while a checkpoint is written.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        super().__init__()
        self.asynchronous = asynchronous
        self._background = BackgroundWriter()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: Content of the checkpoint.
            path: Local path or fsspec URL.
            storage_options: Not supported, as in Lightning.

        Raises:
            WriteError: If the file, or with `asynchronous` an earlier one, cannot be written; the target then stays as
                it was.
        """
        if not self.asynchronous:
            self._write(checkpoint, path, storage_options)
            return
        self._background.ready()
        copied = snapshot(checkpoint)
        self._background.submit(lambda: self._write(copied, path, storage_options))

    def _write(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        filesystem, local_path = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local_path)
        with replacing(target) as staged, writing(target):
            write_file(checkpoint, staged)

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            WriteError: If one could not be written.
        """
        self._background.wait()

    @override
    def teardown(self) -> None:
        """Wait until all checkpoints are written."""
        self.wait()

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint: a file, or the folder of a sharded one.

        Args:
            path: Local path or fsspec URL; a folder must be local.
            map_location: Device of the tensors, as in `torch.load`; by default, and from a folder, the CPU.
            weights_only: False loads arbitrary objects, for files that are trusted; None means True.

        Raises:
            FileNotFoundError: If the path does not exist.
            CheckpointError: If it is not a complete checkpoint, or holds more than plain data.
        """
        self.wait()
        safe = weights_only is not False
        with reading(path):
            if Path(path).is_dir():
                return read_checkpoint_folder(Path(path), safe)
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, safe)
        return loaded

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or folder, its metadata first: a partly removed folder is not a checkpoint.

        With `asynchronous` it is removed when all checkpoints are written, and kept if one could not be written.
        """
        if self.asynchronous:
            self._background.submit(lambda: self._remove(path), even_after_error=False)
        else:
            self._remove(path)

    def _remove(self, path: str | Path) -> None:
        if Path(path).is_dir() and not Path(path).is_symlink():
            (Path(path) / METADATA).unlink(missing_ok=True)
        super().remove_checkpoint(path)


def damage(path: Path) -> str | None:
    """Describe the damage of a local checkpoint, a file or a folder, by its checksums; reads the whole checkpoint.

    Returns:
        None for an intact checkpoint.
    """
    if not path.is_dir():
        return _file_damage(path)
    try:
        _, pieces = read_metadata(path)
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, UserError) as error:
        return _gist(error)
    for file in (path / METADATA, *pieces):
        if cause := _file_damage(file):
            return f"{file.name}: {cause}"
    return None


def newest_whole(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest intact checkpoint in a folder, without changing anything there.

    Returns:
        The file or folder, None if there is none; and the damage of each newer one.
    """
    # A link may name a file that was never completed.
    candidates = [path for path in folder.glob("*.ckpt") if path.exists() and not path.name.startswith(REPLACED)]
    # Old checkpoints that a process was replacing when it was killed.
    candidates += [path for path in folder.glob(f"{REPLACED}*") if not original_path(path).exists()]
    damaged: dict[Path, str] = {}
    for path in sorted(candidates, key=lambda path: path.stat().st_mtime, reverse=True):
        cause = damage(path)
        if cause is None:
            return path, damaged
        damaged[path] = cause
    return None, damaged


def consolidate_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Convert a sharded checkpoint to one file, as a single process would have written it.

    Some functions only read files, such as `load_from_checkpoint`. Needs main memory for the whole checkpoint.

    Args:
        folder: Checkpoint of `ShardedStrategy`.
        file: Path of the new file.
    """
    checkpoint_io = AtomicCheckpointIO()
    checkpoint_io.save_checkpoint(checkpoint_io.load_checkpoint(folder), file)


def divide_checkpoint_file(file: str | Path, folder: str | Path, processes: int) -> None:
    """Convert the file of a single process to a sharded checkpoint, as `ShardedStrategy` would have written it.

    Loading does not need this: any number of sharded processes can load the file. Needs main memory for twice the
    checkpoint.

    Args:
        file: Checkpoint of a single process.
        folder: Path of the new folder.
        processes: Number of files that hold the weights.

    Raises:
        UserError: If `processes` is below 1.
    """
    if processes < 1:
        raise UserError(f"Expected a number of processes of at least 1, got {processes}: correct it.")
    target = Path(folder)
    meta, pieces = divide_checkpoint(AtomicCheckpointIO().load_checkpoint(file), processes)
    with replacing(target) as staged, writing(target):
        staged.mkdir()
        for number, of_file in enumerate(pieces):
            write_file(of_file, staged / shard_file(number))
        write_file(meta, staged / METADATA)


def check_free_among(strategy: Strategy, target: Path) -> None:
    """Check that a path is free on rank 0; every process must call this, and all raise.

    Raises:
        UserError: If the path is taken.
    """
    problem = None
    if strategy.is_global_zero:
        try:
            check_free(target)
        except UserError as error:
            problem = error
    if problem := strategy.broadcast(problem):
        raise problem


def write_file(content: Any, path: Path) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise errors of a failed load in the context with the path and the remedy.

    Raises:
        CheckpointError: If the load fails.
    """
    try:
        yield
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise _read_error(path, error) from error


def _read_error(path: str | Path, error: Exception) -> CheckpointError:
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and foreign:
        return CheckpointError(
            f"Expected a checkpoint of tensors and plain data, got {path} with {foreign[1]}: load it with "
            "weights_only=False if you trust its source."
        )
    return CheckpointError(
        f"Expected a readable checkpoint, got {path}, which is truncated or not a checkpoint ({_gist(error)}): use an "
        "earlier checkpoint."
    )


def _file_damage(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        return _gist(error)
    return None if bad is None else f"the content of {bad} does not have its checksum"


def _gist(error: Exception) -> str:
    """Return the first sentence of an error message, since messages of torch have several paragraphs."""
    lines = str(error).strip().splitlines()
    return lines[0].split(". ")[0] if lines else type(error).__name__
