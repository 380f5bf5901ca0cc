"""Decoding images of unknown quality, and keeping account of those that cannot be used."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

log = logging.getLogger(__name__)

# Formats that Pillow decodes by itself; among the rest are some that start other programs (EPS runs ghostscript).
# (Cameras' multi-image files, MPO, open as JPEG.) Pillow may have been built without the newer ones.
Image.init()
FORMATS = tuple(
    name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000") if name in Image.OPEN
)
SUFFIXES = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tif",
    "PPM": "ppm",
    "AVIF": "avif",
    "JPEG2000": "jp2",
}
"""What files of each format are called; of cameras' multi-image files the first image is used."""
MAX_PIXELS = 89_478_485  # Pillow's own warning threshold: a quarter of a gibibyte at 3 bytes a pixel
MAX_ASPECT = 200  # a transform that resizes the shorter side would make gigabytes of an image of 1 x 1,000,000
MAX_BYTES = 2**30  # of an encoded image: as many pixels, not compressed, of 12 bytes each
NAMED_PER_CAUSE = 5
EMPTY_CAPTION = "empty caption"
CHECK_FROM = 200  # the share of bad samples means little before so many were seen


class Fault(NamedTuple):
    """Why a sample could not be used, and which it was."""

    cause: str
    name: str


class BadSample(Exception):
    """A sample that cannot be used; carries the :class:`Fault`."""

    def __init__(self, cause: str, name: str) -> None:
        super().__init__(cause, name)
        self.fault = Fault(cause, name)


class BadDataError(RuntimeError):
    """Too large a share of the data is unusable."""


ROW_ERRORS = (
    ValueError,  # also of Unicode, of JSON and of Arrow
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,  # JSON that is nested too deeply
    MemoryError,
    OSError,
    EOFError,
    struct.error,
    zlib.error,
)
"""What the content of a row can raise in the code that reads it. Mistakes of that code (names, attributes, assertions)
are not among them: they end the run with a traceback, as do those of transforms, which run outside of :func:`reading`.
"""


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Make whatever the content of one row raises a bad sample; the error's text goes with the name into the log.

    Args:
        name: what to call the row.

    Raises:
        BadSample: with the cause "unreadable" and the kind of error, such as "unreadable (RecursionError)".
    """
    try:
        yield
    except ROW_ERRORS as error:
        raise BadSample(*unreadable(error, name)) from None


def unreadable(error: BaseException, name: str) -> Fault:
    """The fault of a row whose content has raised an error."""
    return Fault(f"unreadable ({type(error).__name__})", f"{name} ({str(error)[:200]})")


def decode_image(
    data: bytes | None, path: str | None, name: str, max_pixels: int = MAX_PIXELS, upright: bool = True
) -> Image.Image:
    """Decode an image to 8-bit RGB, the right way up.

    The format is told from the content, not from the name. Animations give their first frame; transparency is put on
    white; 16-bit images are scaled to 8 bits; EXIF rotation is applied.

    Args:
        data: the encoded file, or None to read ``path``.
        path: file to read when there is no ``data``.
        name: what to call the image in messages.
        max_pixels: larger images are refused from their header, before they are decoded.
        upright: whether to turn the image as its EXIF data say.

    Raises:
        BadSample: with a cause of :func:`read_image`, or "not an image", "too large", "too elongated", "truncated"
            or "unreadable".
    """
    image = _open(read_image(data, path, name), name)
    if image.width * image.height > max_pixels:
        raise BadSample("too large", name)
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise BadSample("too elongated", name)
    try:
        image.load()
    except MemoryError:
        raise BadSample("too large", name) from None
    except (
        Exception
    ) as error:  # Pillow's plugins let SyntaxError, ValueError, struct.error, zlib.error and others through
        raise BadSample(_cause(error), name) from None
    try:
        return _to_rgb(_upright(image) if upright else image)
    except Exception:
        raise BadSample("unreadable", name) from None


def read_image(data: bytes | None, path: str | None, name: str) -> bytes:
    """The encoded image; arguments as in :func:`decode_image`.

    Raises:
        BadSample: with the cause "no image", or one of :func:`read_regular`.
    """
    if data is not None:
        return data
    if not path:
        raise BadSample("no image", name)
    return read_regular(path, name)


def read_regular(path: str | os.PathLike[str], name: str) -> bytes:
    """The content of a regular file: a pipe would be waited for, a device such as `/dev/zero` read without an end.

    Args:
        path: of the file.
        name: what to call it in messages.

    Raises:
        BadSample: with the cause "missing file", "no regular file", "too large", "invalid path" (one that holds NUL or
            lone surrogates) or "unreadable".
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise BadSample("no regular file", name)
            if state.st_size > MAX_BYTES:
                raise BadSample("too large", name)
            return file.read(state.st_size)
    except (FileNotFoundError, NotADirectoryError):
        raise BadSample("missing file", name) from None
    except OSError:
        raise BadSample("unreadable", name) from None
    except ValueError:
        raise BadSample("invalid path", name) from None


def _open_at_once(path: str, flags: int) -> int:
    # Without waiting for somebody who writes into a pipe.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def image_suffix(data: bytes) -> str:
    """What the name of an encoded image ends with by its content, such as "jpg"; it is one that can be decoded."""
    return SUFFIXES[str(_open(data, "").format)]


def _open(data: bytes, name: str) -> Image.Image:
    # Pillow's own size check warns at one limit and raises at twice it, for the whole process; ours replaces it here.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadSample("not an image", name) from None
    except Exception as error:
        raise BadSample(_cause(error), name) from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _cause(error: Exception) -> str:
    return "truncated" if "truncated" in str(error).lower() else "unreadable"


def _upright(image: Image.Image) -> Image.Image:
    with contextlib.suppress(Exception):  # damaged EXIF data says nothing about the pixels
        ImageOps.exif_transpose(image, in_place=True)  # not in place it is a copy, turned or not
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB. Pillow's ``convert`` clips 16-bit values at 255 and drops transparency, so both go another way."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image).astype(np.float64)
        top = values.max(initial=0)
        if image.mode == "F" and top <= 1:
            values = values * 255
        elif image.mode.startswith("I;16") or top > 255:
            values = values * (255 / 65535)
        return Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


class Account:
    """Counts unusable samples of one split by cause, names the first few, and ends the run past a share.

    Lives in the main process; loader workers send what they met along with each batch.

    Args:
        split: name of the split, for messages.
        max_bad_share: largest share of unusable samples that the run goes on with.
        action: what happens to such a sample, for messages.
    """

    def __init__(self, split: str, max_bad_share: float, action: str = "replaced") -> None:
        self.split = split
        self.max_bad_share = max_bad_share
        self.action = action
        self.seen = 0
        self.causes: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        self._told = 0

    def update(self, seen: int, faults: list[Fault]) -> None:
        """Add one batch's counts.

        Raises:
            BadDataError: the share is past the limit.
        """
        self.seen += seen
        for cause, name in faults:
            self.causes[cause] += 1
            if self.causes[cause] <= NAMED_PER_CAUSE:
                log.warning("%s sample %s is unusable (%s): %s", self.split, name, cause, self.action)
            if self.causes[cause] == NAMED_PER_CAUSE:
                log.warning("further %s samples with the cause '%s' are counted, not named", self.split, cause)
        if self.seen >= CHECK_FROM:
            self.check()

    def remark(self, notes: Iterable[Fault]) -> None:
        """Count what is worth knowing of usable samples, and name the first of each kind."""
        for kind, name in notes:
            self.remarks[kind] += 1
            if self.remarks[kind] == 1:
                log.warning("%s sample %s: %s; further ones are counted", self.split, name, kind)

    def check(self) -> None:
        """Raise where the share of unusable samples is past the limit."""
        if self.causes.total() > self.max_bad_share * self.seen:
            self.fail()

    def end_of_pass(self) -> None:
        """Say how many samples were unusable so far, where that has changed, and check their share."""
        if self.causes.total() > self._told:
            self._told = self.causes.total()
            log.warning("unusable %s samples so far: %s", self.split, self.summary())
        for kind, count in self.remarks.items():
            log.info("%s samples with '%s' so far: %d of %d", self.split, kind, count, self.seen)
        self.check()

    def fail(self) -> None:
        """End the run.

        Raises:
            BadDataError: always.
        """
        raise BadDataError(
            f"found {self.summary()} of the {self.split} samples unusable, expected at most "
            f"{self.max_bad_share:.2%} (max_bad_share): mend the data or raise that limit"
        )

    def summary(self) -> str:
        """The counts, as in ``3 of 200 (truncated: 2, missing file: 1)``."""
        causes = ", ".join(f"{cause}: {count}" for cause, count in self.causes.most_common())
        return f"{self.causes.total()} of {self.seen} ({causes})"
