"""Parquet files that appear whole."""

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from lightning.pytorch import Trainer


def prediction_folder(trainer: Trainer, folder: str | None) -> Path:
    """Where predictions go: the given folder, else `predictions` in the Trainer's `default_root_dir`."""
    return Path(folder or Path(trainer.default_root_dir) / "predictions")


def write_table(table: Any, file: Path) -> None:
    """Writes a table beside its place, then renames it; the folder is made.

    Args:
        table: Of pyarrow.
        file: Its place.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_name(f".{file.stem}.incomplete")
    try:
        pq.write_table(table, staged)
        os.replace(staged, file)
    finally:
        staged.unlink(missing_ok=True)
