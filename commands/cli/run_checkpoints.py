"""Which checkpoint in a run's folder a run goes on from, or evaluates."""

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...callbacks.checkpoints.checkpoint_io import newest_whole
from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ...common.errors import UserError
from ...common.messages import say, warn


def checkpoint_of(run: Path, best: bool) -> Path:
    """Return the newest checkpoint in a run's folder, or the best one if it keeps one, and print it.

    Raises:
        UserError: If no checkpoint is whole.
    """
    newest = whole_checkpoint(run / "checkpoints")
    if newest is None:
        raise UserError(
            f"Expected a checkpoint in the run folder {str(run)!r}, got none: name another run or checkpoint."
        )
    path = (best_beside(newest) if best else None) or newest
    say(f"Checkpoint: {path}, the {'newest' if path == newest else 'best'} of its run.")
    return path


def resolved(path: str | Path, best: bool = True) -> Path:
    """Return a path, or the checkpoint in it if it is a run's folder: the best that the run keeps, else the newest.

    Args:
        path: Checkpoint, export, run's folder, or any other path.
        best: Whether the best checkpoint is taken; else the newest.

    Raises:
        UserError: If it is a run's folder without a whole checkpoint.
    """
    target = Path(path).expanduser()
    return checkpoint_of(target, best) if (target / "checkpoints").is_dir() else target


def whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in a folder, with a warning for each newer damaged one; None if it is empty.

    Raises:
        UserError: If all are damaged.
    """
    newest, damaged = newest_whole(folder)
    for path, reason in damaged.items():
        warn(f"The checkpoint {str(path)!r} is damaged ({reason}).")
    if newest is None and damaged:
        raise UserError(
            f"Expected a whole checkpoint in {str(folder)!r}, got none: start anew, or give --ckpt_path the file of "
            "another run."
        )
    if damaged:
        warn(f"Going on from {str(newest)!r}, the newest one that is whole.")
    return newest


def last_saved(run: Path) -> float:
    """Return when the newest checkpoint in a run's folder was written, in seconds; 0 without one."""
    return max((path.stat().st_mtime for path in (run / "checkpoints").glob("*.ckpt")), default=0.0)


def best_beside(checkpoint: Path) -> Path | None:
    """Return the best checkpoint that a run knew when it wrote this one, if it is still in the same folder.

    Args:
        checkpoint: A whole checkpoint, a file or a folder.
    """
    for name, state in (_mapped(checkpoint).get("callbacks") or {}).items():
        best = state.get("best_model_path") if isinstance(state, Mapping) else None
        if str(name).startswith("BestCheckpoint") and isinstance(best, str) and best:
            path = checkpoint.with_name(Path(best).name)
            return path if path.exists() else None
    return None


def best_of(runs: Sequence[Path]) -> Path | None:
    """Return the checkpoint that is the best one of several folders, and print it; None if none of them keeps one.

    Folders whose best checkpoint was chosen by another metric than that of the newest folder are left out.

    Args:
        runs: Run folders in ascending order of age; of equal values the newest one's is taken.
    """
    candidates = [
        best_file for run in runs for file in (run / "checkpoints").glob("*.ckpt") if (best_file := _kept_best(file))
    ]
    if not candidates:
        return None
    metric = candidates[-1][0]
    sign = 1 if metric[1] == "max" else -1
    best = None
    score = -math.inf
    for other, value, path in candidates:
        if other == metric and sign * value >= score:
            best = path
            score = sign * value
    if best is not None:
        say(f"Checkpoint: {best}, the best of its run, {metric[0]} {sign * score:.4g}.")
    return best


def _kept_best(checkpoint: Path) -> tuple[tuple[str, str], float, Path] | None:
    """Return by which metric and mode a run chose its best checkpoint, the value, and the file beside this one."""
    try:
        states = _mapped(checkpoint).get("callbacks") or {}
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):  # damaged
        return None
    path = best_beside(checkpoint)
    for name, state in states.items():
        if path is not None and str(name).startswith("BestCheckpoint") and state.get("best_model_score") is not None:
            mode = "max" if "'mode': 'max'" in name else "min"
            return (str(state["monitor"]), mode), float(state["best_model_score"]), path
    return None


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint."""
    return int(_mapped(checkpoint)["global_step"])


def _mapped(checkpoint: Path) -> Any:
    path = checkpoint / METADATA if checkpoint.is_dir() else checkpoint
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
