"""Sets that are tables: image-text retrieval, WinoGAViL, and captions with a wrong one.

A table is a folder of Parquet files, a JSON-lines file, or what else the project's datamodules read, at
`<root>/<folder>`, `<root>/<folder>/<folder>.jsonl` or `<root>/<folder>.jsonl`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...common.errors import UserError
from ...datamodules.base.decode import MAX_PIXELS, decode_image
from ...datamodules.base.faults import BadSample
from ...datamodules.base.samples import Transform
from ...datamodules.reading.open import Opening
from ...datamodules.reading.table import PairTable
from .encoding import Sample

_ENDINGS = ("", ".jsonl", ".json", ".parquet", ".csv")


def find_table(root: Path, folder: str) -> Path | None:
    """Return the path of a table; None if there is none."""
    places = (f"{folder}/{folder}.jsonl", *(f"{folder}{ending}" for ending in _ENDINGS))
    return next((path for place in places if (path := root / place).exists()), None)


class PairImages(torch.utils.data.Dataset[Sample]):
    """The images of a table of images and captions; `table.images` holds the rows of each image.

    Args:
        path: The table, with columns `image` and `caption`.
        transform: RGB image to uint8 [3, S, S].
    """

    def __init__(self, path: Path, transform: Transform) -> None:
        opening = Opening(None, "image", "caption", None, None)
        self.table = PairTable([opening.open(str(path), "test")], MAX_PIXELS)
        self.rows = self.table.images()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Sample:
        """Return an image; raises `BadSample` if it cannot be used."""
        return Sample(self.transform(self.table.image(self.rows[number][0])))

    def captions(self, number: int) -> list[str]:
        """Return the captions of an image that are not empty."""
        found = []
        for row in self.rows[number]:
            try:
                found += [text for text in self.table.captions(row) if text.strip()]
            except BadSample:
                continue  # the image is counted when it is read
        return found


class NamedImages(torch.utils.data.Dataset[Sample]):
    """Images by name, each once.

    Args:
        images: Encoded images, or paths of files.
        transform: RGB image to uint8 [3, S, S].
    """

    def __init__(self, images: dict[str, bytes | Path], transform: Transform) -> None:
        self.names = list(images)
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Sample:
        """Return an image; raises `BadSample` if it cannot be used."""
        content = self.images[name := self.names[number]]
        data, path = (content, None) if isinstance(content, bytes) else (None, str(content))
        return Sample(self.transform(decode_image(data, path, path or name)))


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table of Parquet files or JSON lines.

    Args:
        path: A folder of Parquet files, or a file.
        columns: Columns that each row must have.

    Raises:
        UserError: If the table cannot be read, is empty, or lacks a column.
    """
    if path.suffix in (".jsonl", ".json"):
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise UserError(f"Expected JSON lines in {str(path)!r}, got another file ({error}): correct it.") from None
    else:
        rows = _parquet_rows(path)
    if not rows:
        raise UserError(f"Expected rows in {str(path)!r}, got none: get the set again.")
    for number, row in enumerate(rows):
        missing = [column for column in columns if not isinstance(row, dict) or column not in row]
        if missing:
            raise UserError(
                f"Expected {', '.join(columns)} in each row of {str(path)!r}, got row {number} without "
                f"{', '.join(missing)}: correct it."
            )
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of Parquet files, or of the Arrow files that `datasets` saves."""
    import pyarrow
    import pyarrow.parquet

    def read(file: Path) -> Any:
        if file.suffix != ".arrow":
            return pyarrow.parquet.read_table(file)
        with pyarrow.memory_map(str(file)) as content:
            return pyarrow.ipc.open_stream(content).read_all()

    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.parquet")) or sorted(path.rglob("*.arrow"))
    try:
        return [row for file in files for row in read(file).to_pylist()]
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(
            f"Expected Parquet files in {str(path)!r}, got an error ({error}): get the set again."
        ) from None
