"""Captions that an image is compared with: lines of a text file, or the captions of a table."""

from collections.abc import Iterator
from pathlib import Path

from ...common.errors import UserError
from ...datamodules.base.faults import ROW_ERRORS, BadSample
from ...datamodules.reading.layout import captions_in
from ...datamodules.reading.lists import read_items
from ...datamodules.text.captions import is_text
from ..evaluate.image_sets import read_lines
from .folder import is_below

_TABLES = (".json", ".jsonl", ".csv")


def read_captions(file: Path) -> list[str]:
    """Return the captions of a file, each once.

    Args:
        file: A text file with a caption a line; or JSON, JSON lines or CSV with captions under `caption`.

    Raises:
        UserError: If there is no such file, or no caption in it.
    """
    if not file.is_file():
        raise UserError(f"Expected a file of captions after --captions, got {str(file)!r}: correct it.")
    captions = list(dict.fromkeys(_of_table(file) if file.suffix in _TABLES else read_lines(file)))
    if not captions:
        raise UserError(f"Expected captions under `caption` in {str(file)!r}, got none: give another file.")
    return captions


def captions_beside(folder: Path) -> tuple[list[str], str | None]:
    """Return the captions of the first table in a folder that has any, and its name."""
    for file in sorted(path for path in folder.iterdir() if path.suffix in _TABLES and is_below(folder, path)):
        try:
            return read_captions(file), file.name
        except UserError:  # another table
            continue
    return [], None


def _of_table(file: Path) -> Iterator[str]:
    for read in read_items(str(file)):
        try:
            item = read()
            found = captions_in(item.get("caption")) if isinstance(item, dict) else []
        except (BadSample, *ROW_ERRORS):
            continue
        yield from (caption.strip() for caption in found if is_text(caption) and caption.strip())
