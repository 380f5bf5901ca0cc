"""Parquet files that are written atomically."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from lightning.pytorch import Trainer

from ...common.files import replacing


def prediction_folder(trainer: Trainer, folder: str | None) -> Path:
    """Return the given folder, by default `predictions` in the Trainer's `default_root_dir`."""
    return Path(folder or Path(trainer.default_root_dir) / "predictions")


def write_table(table: Any, file: Path) -> None:
    """Write a table atomically, and make its folder.

    Args:
        table: Table of pyarrow.
        file: Path of the file.
    """
    with replacing(file) as staged:
        pq.write_table(table, staged)
