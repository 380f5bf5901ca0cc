"""Checkpoint files that are whole or not there at all."""

import os
import pickle
import re
import uuid
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a file beside its target and renames it into place.

    Lightning stages its file in the system's temporary folder; where that is another file system than the target's,
    the move is a copy onto the final name, and a full disk destroys the good checkpoint that was there. Here the old
    file stays as it is until the new one is completely on disk. Remote paths go the way that Lightning goes.

    Loading takes plain data only (`weights_only=True`) unless the Trainer is told otherwise.

    Pass it to the Trainer: `Trainer(plugins=[AtomicCheckpointIO()])`.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Saves a checkpoint.

        Args:
            checkpoint: What to save.
            path: Local path or fsspec URL.
            storage_options: Not supported, as in Lightning.

        Raises:
            OSError: If the file cannot be written; the target is then what it was before.
        """
        filesystem, local_path = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not made from the target's name: Lightning takes every file with `ckpt_` in it for one of its own.
        sibling = target.parent / f".incomplete-{uuid.uuid4().hex}"
        try:
            with sibling.open("xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(sibling, target)
        except (OSError, RuntimeError) as error:
            raise _write_error(target, error) from error
        finally:
            sibling.unlink(missing_ok=True)
        _sync_folder(target.parent)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint.

        Args:
            path: Local path or fsspec URL.
            map_location: Where the tensors go, as in `torch.load`; by default they stay on the CPU.
            weights_only: False loads arbitrary objects, for files that are trusted; None means True.

        Raises:
            FileNotFoundError: If there is no such file.
            RuntimeError: If the file is not a whole checkpoint, or holds more than plain data.
        """
        try:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only is not False)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise _read_error(path, error) from error
        return loaded


def _write_error(target: Path, error: Exception) -> OSError:
    # torch reports a failed write as a RuntimeError, with the reason, if any, behind it.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    kept = "the file that was there before is unchanged" if target.exists() else "nothing is left of it"
    reason = cause if cause is not None else error
    number = cause.errno if isinstance(cause, OSError) else None
    message = (
        f"The checkpoint {target} could not be written ({reason}); {kept}: check the free space and the permissions."
    )
    return OSError(number, message) if number is not None else OSError(message)


def _read_error(path: str | Path, error: Exception) -> RuntimeError:
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and foreign:
        return RuntimeError(
            f"The checkpoint {path} holds more than tensors and plain data ({foreign[1]}): if you trust where "
            "it comes from, load it with weights_only=False."
        )
    return RuntimeError(
        f"The checkpoint {path} cannot be read ({_gist(error)}): it is truncated or not a checkpoint, take an "
        "earlier one."
    )


def _gist(error: Exception) -> str:
    """Returns the first sentence of a message; torch's go on for paragraphs."""
    lines = str(error).strip().splitlines()
    return lines[0].split(". ")[0] if lines else type(error).__name__


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power failure, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse it for folders
        pass
    finally:
        os.close(descriptor)
