"""Parquet files that appear whole."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from lightning.pytorch import Trainer

from ...common.files import replacing


def prediction_folder(trainer: Trainer, folder: str | None) -> Path:
    """Where predictions go: the given folder, else `predictions` in the Trainer's `default_root_dir`."""
    return Path(folder or Path(trainer.default_root_dir) / "predictions")


def write_table(table: Any, file: Path) -> None:
    """Writes a table beside its place, then renames it; the folder is made.

    Args:
        table: Of pyarrow.
        file: Its place.
    """
    with replacing(file) as staged:
        pq.write_table(table, staged)
