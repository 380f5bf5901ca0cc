"""Decoding of images that may be damaged."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from ...common.errors import UserError
from .faults import BadSample

Decoder = Literal["pillow", "torchcodec"]
_decoder: ContextVar[Decoder] = ContextVar("decoder", default="pillow")

# Formats that Pillow decodes without external programs (EPS would run Ghostscript). Multi-picture files of cameras
# (MPO) are opened as JPEG. Pillow may have been built without the newer formats.
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
"""File name suffix of each format. The first image of a multi-picture file (MPO) is used."""
_ALIKE = {"JPEG": ("RGB", "L"), "WEBP": ("RGB",)}
"""Modes of the formats that torchcodec decodes; Pillow would decode a PNG file to find its orientation."""
MAX_PIXELS = 89_478_485  # Pillow's own warning threshold: a quarter of a gibibyte at 3 bytes per pixel
MAX_ASPECT = 200  # resizing the shorter side of an image of 1 x 1,000,000 would take gigabytes
MAX_BYTES = 2**30  # of an encoded image: MAX_PIXELS uncompressed pixels of 12 bytes each


def check_decoder(decoder: Decoder) -> None:
    """Check that the package of a decoder is installed.

    Raises:
        UserError: If it is not.
    """
    if decoder == "torchcodec" and find_spec("torchcodec") is None:
        raise UserError(
            "Expected the package torchcodec for data.decoder 'torchcodec', got none: run "
            "`pip install vlightning[torchcodec]`, or leave data.decoder out."
        )


@contextlib.contextmanager
def decoding_by(decoder: Decoder) -> Iterator[None]:
    """Decode images by a decoder inside the context; the pixels are the same."""
    token = _decoder.set(decoder)
    try:
        yield
    finally:
        _decoder.reset(token)


def decode_image(
    data: bytes | None, path: str | None, name: str, max_pixels: int = MAX_PIXELS, upright: bool = True
) -> Image.Image:
    """Decode an image to 8-bit RGB.

    The format is detected by the content, not by the name. The first frame of an animation is used; transparent pixels
    are composited onto white; 16-bit images are scaled to 8 bits; the EXIF orientation is applied.

    Args:
        data: the encoded file, or None to read `path`.
        path: file to read if `data` is None.
        name: name of the image in messages.
        max_pixels: images with more pixels are refused; only their header is decoded.
        upright: whether to apply the EXIF orientation.

    Raises:
        BadSample: If the image cannot be used; the cause is one of `read_image`, or "not an image", "too large",
            "too elongated", "truncated" or "unreadable".
    """
    encoded = read_image(data, path, name)
    image = _open(encoded, name)
    if image.width * image.height > max_pixels:
        raise BadSample("too large", name)
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise BadSample("too elongated", name)
    try:
        image = _loaded(image, encoded)
    except MemoryError:
        raise BadSample("too large", name) from None
    except Exception as error:  # Pillow's plugins raise SyntaxError, ValueError, struct.error, zlib.error and others
        raise BadSample(_cause(error), name) from None
    try:
        return _to_rgb(_upright(image) if upright else image)
    except Exception:
        raise BadSample("unreadable", name) from None


def _loaded(image: Image.Image, encoded: bytes) -> Image.Image:
    """Decode the pixels of an opened image."""
    if _decoder.get() == "torchcodec" and _is_decoded_alike(image):
        from torchcodec import decoders

        with contextlib.suppress(RuntimeError):  # Pillow then tells what is wrong
            pixels = decoders.decode_image(encoded, mode="RGB")
            return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.load()
    return image


def _is_decoded_alike(image: Image.Image) -> bool:
    """Return whether torchcodec decodes to the pixels of Pillow: still images of 8 bits without transparency."""
    alike = image.mode in _ALIKE.get(image.format or "", ()) and "transparency" not in image.info
    return alike and getattr(image, "n_frames", 1) == 1 and not _is_turned(image)


def _is_turned(image: Image.Image) -> bool:
    """Return whether an image has an EXIF orientation, which torchcodec applies, or damaged EXIF data."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception:
        return True


def read_image(data: bytes | None, path: str | None, name: str) -> bytes:
    """Return the encoded image; arguments as in `decode_image`.

    Raises:
        BadSample: If there is no image; the cause is "no image", or one of `read_regular`.
    """
    if data is not None:
        return data
    if not path:
        raise BadSample("no image", name)
    return read_regular(path, name)


def content_hash(data: bytes) -> bytes:
    """Return a 128-bit hash of the bytes of an encoded image; files of equal content have equal hashes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def read_regular(path: str | os.PathLike[str], name: str) -> bytes:
    """Read a regular file; other files are refused, since a pipe would block and `/dev/zero` has no end.

    Args:
        path: path of the file.
        name: name of the file in messages.

    Raises:
        BadSample: If the file cannot be read; the cause is "missing file", "no regular file", "too large", "invalid
            path" (one with NUL or lone surrogates) or "unreadable".
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
    # Opening a pipe does not wait for its writer.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def image_suffix(data: bytes) -> str:
    """Return the file name suffix for the format of an encoded image, such as "jpg"; the image must be readable."""
    return SUFFIXES[str(_open(data, "").format)]


def _open(data: bytes, name: str) -> Image.Image:
    # `max_pixels` replaces Pillow's own size check, which applies to the whole process: it warns at a limit and raises
    # at twice that limit.
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
    with contextlib.suppress(Exception):  # the pixels of an image with damaged EXIF data may be intact
        ImageOps.exif_transpose(image, in_place=True)  # in_place: otherwise every image is copied
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB; Pillow's `convert` alone clips 16-bit values at 255 and drops transparency."""
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
