"""The images of a folder, and no file outside of it, or of a table; their titles, and captions to compare with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from ...common.errors import UserError
from ...common.messages import warn
from ...datamodules.base.decode import MAX_PIXELS, decode_image
from ...datamodules.base.faults import ROW_ERRORS, BadSample
from ...datamodules.reading.layout import captions_in
from ...datamodules.reading.lists import read_items
from ...datamodules.reading.open import Opening, resolve_tables
from ...datamodules.reading.resolve import Source
from ...datamodules.reading.table import PairTable
from ...datamodules.text.captions import is_text
from ..evaluate.classified_folder import image_files
from ..evaluate.image_sets import read_lines

Stamp = tuple[str, int, int]
"""Path of an image below the folder, its size in bytes, and the time of its last change in nanoseconds."""


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Images of a folder and of the folders in it.

    Attributes:
        root: The folder, without links in its path.
        names: Paths of the images below it, in order.
        outside: Number of links that lead out of it, which are left out.
        titles: Titles of images by their names.
    """

    root: Path
    names: tuple[str, ...]
    outside: int = 0
    titles: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return the path of an image.

        Raises:
            BadSample: If it leads out of the folder.
        """
        if not is_below(self.root, path := self.root / name):
            raise BadSample("outside of the folder", name)
        return path

    def content(self, name: str) -> bytes | Path:
        """Return the path of an image; raises `BadSample`."""
        return self.path(name)

    def stamp(self, name: str) -> Stamp:
        """Return what changes with an image."""
        status = self.path(name).stat()
        return name, status.st_size, status.st_mtime_ns

    def open(self, name: str) -> Image.Image:
        """Decode an image to RGB.

        Raises:
            BadSample: If it cannot be used.
        """
        content = self.content(name)
        data, path = (content, None) if isinstance(content, bytes) else (None, str(content))
        return decode_image(data, path, name)


@dataclass(frozen=True, eq=False)
class ImageTable(ImageFolder):
    """Images that a table names or contains, each once, under the names of `PairTable`.

    Attributes:
        rows: The rows of the table.
        row_of: First row of each image by its name.
    """

    rows: PairTable = field(kw_only=True)
    row_of: Mapping[str, int] = field(kw_only=True)

    def path(self, name: str) -> Path:
        """Return the path of an image; that of the table, if this contains the image."""
        image = self.rows.stored_image(self.row_of[name])
        return self.root if image.path is None or image.data is not None else Path(image.path)

    def stamp(self, name: str) -> Stamp:
        """Return what changes with an image; of a file that is missing, its name."""
        try:
            return super().stamp(name)
        except OSError:
            return name, 0, 0

    def content(self, name: str) -> bytes | Path:
        """Return an encoded image, or its path; raises `BadSample`."""
        image = self.rows.stored_image(self.row_of[name])
        return self.path(name) if image.data is None else image.data


def read_folder(folder: str, option: str = "after --images") -> ImageFolder:
    """Find the images of a folder.

    Args:
        folder: The folder.
        option: Where it was given, for messages.

    Raises:
        UserError: If there is no such folder, or no image in it.
    """
    root = Path(folder).expanduser().resolve()
    if not root.is_dir():
        raise UserError(f"Expected a folder of images {option}, got {folder!r}: correct it.")
    paths = image_files(root)
    names = tuple(str(path.relative_to(root)) for path in paths if is_below(root, path))
    if not names:
        content = f"{len(paths)} links that lead out of it" if paths else "no image files"
        raise UserError(f"Expected images in {folder!r}, got {content}: give another folder.")
    return ImageFolder(root, names, len(paths) - len(names))


def read_table(file: str, image_column: str, caption_column: str) -> ImageTable:
    """Read the images of a JSON, JSON lines, CSV or Parquet file, whose titles are their first captions.

    Args:
        file: The file.
        image_column: Column of the images: encoded, or paths below the folder of the file.
        caption_column: Column of the captions, which the file may lack.

    Raises:
        UserError: If the file cannot be read, lacks the column of the images, or has no row.
    """
    resolve_tables(Source(file), "images")
    opening = Opening(None, image_column, caption_column, None, None, need_captions=False)
    try:
        rows = PairTable([opening.open(file, "predict")], MAX_PIXELS)
    except UserError as error:
        raise UserError(str(error).replace("set data.", "set --")) from None  # the options of this command
    row_of: dict[str, int] = {}
    titles: dict[str, str] = {}
    for group in rows.images():
        try:
            name = rows.image_name(group[0])
        except BadSample:
            continue
        row_of[name] = group[0]
        captions = (caption.strip() for row in group for caption in rows.captions(row))
        if title := next((caption for caption in captions if caption), None):
            titles[name] = title
    return ImageTable(Path(file).expanduser().resolve(), tuple(row_of), titles=titles, rows=rows, row_of=row_of)


def is_below(root: Path, path: Path) -> bool:
    """Return whether a path, with its links followed, is below a folder, which has no link in its path."""
    return path.resolve().is_relative_to(root)


def small(folder: ImageFolder, name: str, side: int) -> Image.Image | None:
    """Return an image of at most so many pixels a side; None if it can no longer be read."""
    try:
        return _small(folder, folder.stamp(name), side)
    except (BadSample, OSError):
        return None


@lru_cache(512)
def _small(folder: ImageFolder, stamp: Stamp, side: int) -> Image.Image:
    image = folder.open(stamp[0]).copy()
    image.thumbnail((side, side))
    return image


_TABLES = (".json", ".jsonl", ".csv")


def read_captions(file: Path, column: str = "caption") -> list[str]:
    """Return the captions of a file, each once: its lines, or those of a column of JSON, JSON lines or CSV.

    Raises:
        UserError: If there is no such file, or no caption in it.
    """
    if not file.is_file():
        raise UserError(f"Expected a file of captions after --captions, got {str(file)!r}: correct it.")
    if file.suffix in _TABLES:
        captions = [caption for item in _items(file) for caption in _captions(item, column)]
    else:
        captions = read_lines(file)
    if not captions:
        raise UserError(f"Expected captions under `{column}` in {str(file)!r}, got none: give another file or column.")
    return list(dict.fromkeys(captions))


def captions_beside(folder: Path, column: str = "caption") -> tuple[list[str], Path | None]:
    """Return the captions of the first table in a folder that has any, and the table."""
    for file in sorted(path for path in folder.iterdir() if path.suffix in _TABLES and is_below(folder, path)):
        try:
            return read_captions(file, column), file
        except UserError:  # another table
            continue
    return [], None


def titled(
    folder: ImageFolder, captions: str | None, column: str | None, image_column: str
) -> tuple[ImageFolder, list[str], Path | None]:
    """Return a folder with the titles of its images, the captions of a file, and the file.

    A warning says when a named table has no title of any of the images.

    Args:
        folder: The images.
        captions: A file as of `read_captions`; None for a table in the folder.
        column: Column of the captions in it; None for `caption`.
        image_column: Column of the images' names in it.

    Raises:
        UserError: If there is no such file or column, or no caption in it.
    """
    name = column or "caption"
    file: Path | None
    if captions is not None:
        file = Path(captions).expanduser()
        texts = read_captions(file, name)
    else:
        texts, file = captions_beside(folder.root, name)
        if file is None and column is not None:
            raise UserError(
                f"Expected a table with the column {column!r} in {str(folder.root)!r} for --caption_column, got none: "
                "give its file after --captions, or correct the column."
            )
    titles = {} if file is None else read_titles(folder, file, name, image_column)
    if captions is not None and file is not None and file.suffix in _TABLES and not titles:
        images = f"no image of {folder.root} under {image_column!r}"
        warn(f"No titles: {file} names {images}; name the column with --image_column.")
    return replace(folder, titles=titles), texts, file


def read_titles(folder: ImageFolder, file: Path, column: str, image_column: str) -> dict[str, str]:
    """Return the first captions of the images of a folder that a table names, by the names of the images.

    The table names an image under the image column, or `file_name`, by its path from the folder of the table or of the
    images.
    """
    if file.suffix not in _TABLES:
        return {}
    names = set(folder.names)
    titles: dict[str, str] = {}
    for item in _items(file):
        name = item.get(image_column, item.get("file_name"))
        captions = _captions(item, column)
        if not isinstance(name, str) or not captions:
            continue
        for root in (folder.root, file.parent):
            path = (root / name).resolve()
            if path.is_relative_to(folder.root) and (below := str(path.relative_to(folder.root))) in names:
                titles.setdefault(below, captions[0])
                break
    return titles


def _items(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a table."""
    for read in read_items(str(file)):
        try:
            item = read()
        except (BadSample, *ROW_ERRORS):
            continue
        if isinstance(item, dict):
            yield item


def _captions(item: dict[str, Any], column: str) -> list[str]:
    captions = captions_in(item.get(column))
    return [caption.strip() for caption in captions if is_text(caption) and caption.strip()]
