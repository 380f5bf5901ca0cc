"""The images of a folder, and no file outside of it; the captions that an image is compared with."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import Image

from ...common.errors import UserError
from ...datamodules.base.decode import decode_image
from ...datamodules.base.faults import ROW_ERRORS, BadSample
from ...datamodules.reading.layout import captions_in
from ...datamodules.reading.lists import read_items
from ...datamodules.text.captions import is_text
from ..evaluate.classified_folder import image_files
from ..evaluate.image_sets import read_lines

Stamp = tuple[str, int, int]
"""Path of an image below the folder, its size in bytes, and the time of its last change in nanoseconds."""


@dataclass(frozen=True)
class ImageFolder:
    """Images of a folder and of the folders in it.

    Attributes:
        root: The folder, without links in its path.
        names: Paths of the images below it, in order.
        outside: Number of links that lead out of it, which are left out.
    """

    root: Path
    names: tuple[str, ...]
    outside: int = 0

    def path(self, name: str) -> Path:
        """Return the path of an image.

        Raises:
            BadSample: If it leads out of the folder.
        """
        if not is_below(self.root, path := self.root / name):
            raise BadSample("outside of the folder", name)
        return path

    def stamp(self, name: str) -> Stamp:
        """Return what changes with an image."""
        status = self.path(name).stat()
        return name, status.st_size, status.st_mtime_ns

    def open(self, name: str) -> Image.Image:
        """Decode an image to RGB.

        Raises:
            BadSample: If it cannot be used.
        """
        return decode_image(None, str(self.path(name)), name)


def read_folder(folder: str) -> ImageFolder:
    """Find the images of a folder.

    Raises:
        UserError: If there is no such folder, or no image in it.
    """
    root = Path(folder).expanduser().resolve()
    if not root.is_dir():
        raise UserError(f"Expected a folder of images after --images, got {folder!r}: correct it.")
    paths = image_files(root)
    names = tuple(str(path.relative_to(root)) for path in paths if is_below(root, path))
    if not names:
        content = f"{len(paths)} links that lead out of it" if paths else "no image files"
        raise UserError(f"Expected images in {folder!r}, got {content}: give another folder.")
    return ImageFolder(root, names, len(paths) - len(names))


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


def read_captions(file: Path) -> list[str]:
    """Return the captions of a file, each once: its lines, or those under `caption` in JSON, JSON lines or CSV.

    Raises:
        UserError: If there is no such file, or no caption in it.
    """
    if not file.is_file():
        raise UserError(f"Expected a file of captions after --captions, got {str(file)!r}: correct it.")
    captions = list(dict.fromkeys(_captions_of_table(file) if file.suffix in _TABLES else read_lines(file)))
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


def _captions_of_table(file: Path) -> Iterator[str]:
    for read in read_items(str(file)):
        try:
            item = read()
            captions = captions_in(item.get("caption")) if isinstance(item, dict) else []
        except (BadSample, *ROW_ERRORS):
            continue
        yield from (caption.strip() for caption in captions if is_text(caption) and caption.strip())
