"""Decoding of images by Pillow and by torchcodec, and what it is of a training sample: milliseconds, one thread.

    pip install -e ".[torchcodec]"
    python benchmarks/decoding.py                     # generated images of 500 x 375 pixels
    python benchmarks/decoding.py --images FOLDER     # the JPEG and WebP files of a folder

"decode" is what a datamodule does with an encoded image, checks included, to a PIL image; "sample" adds ALBEF's
training transform at 224 px. The decoders are interleaved, and the medians of their processor time are printed.
"""

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from PIL import Image

from vlightning.datamodules import ALBEFTrainTransform
from vlightning.datamodules.base.decode import Decoder, decode_image, decoding_by
from vlightning.datamodules.transforms.normalize import in_pixels

FORMATS = {"JPEG": {"quality": 90}, "WEBP": {"quality": 90}}


def drawn(count: int) -> list[Image.Image]:
    """Generate images with the detail of photographs."""
    numbers = np.random.default_rng(0)
    images = []
    for _ in range(count):
        image = Image.new("RGB", (500, 375))
        for cells in (4, 24, 120):  # noise from coarse to fine
            noise = Image.fromarray(numbers.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            image = Image.blend(image, noise.resize(image.size, Image.Resampling.BICUBIC), 0.9 if cells == 4 else 0.25)
        images.append(image)
    return images


def encoded(image: Image.Image, kind: str) -> bytes:
    """Encode an image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **FORMATS[kind])
    return buffer.getvalue()


def files_by_format(options: argparse.Namespace) -> dict[str, list[bytes]]:
    """Return the encoded images of each format."""
    if options.images is None:
        images = drawn(options.count)
        return {kind: [encoded(image, kind) for image in images] for kind in FORMATS}
    suffixes = {"JPEG": (".jpg", ".jpeg"), "WEBP": (".webp",)}
    paths = sorted(options.images.rglob("*"))
    found = {
        kind: [path.read_bytes() for path in paths if path.suffix.lower() in ends] for kind, ends in suffixes.items()
    }
    return {kind: files[: options.count] for kind, files in found.items() if files}


def median_times(read: Callable[[bytes], object], files: list[bytes], repeats: int) -> dict[str, float]:
    """Return the median processor time of an image by decoder, milliseconds."""
    times: dict[str, list[float]] = {decoder: [] for decoder in get_args(Decoder)}
    for _ in range(repeats + 1):
        for decoder in get_args(Decoder):
            with decoding_by(decoder):
                start = time.process_time()
                for data in files:
                    read(data)
            times[decoder].append(1000 * (time.process_time() - start) / len(files))
    return {decoder: statistics.median(passes[1:]) for decoder, passes in times.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="folder of images; by default they are drawn")
    parser.add_argument("--count", type=int, default=32, help="number of images of each format")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transform = in_pixels(ALBEFTrainTransform(224))

    def decode(data: bytes) -> Image.Image:
        return decode_image(data, None, "an image")

    packages = ", ".join(f"{name} {version(name)}" for name in ("pillow", "torchcodec", "torch"))
    sys.stdout.write(f"{packages}; {options.count} images of each format, medians of {options.repeats} passes\n\n")
    sys.stdout.write(
        "| format | decode: pillow | torchcodec | ratio | sample: pillow | torchcodec | ratio | largest difference |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for kind, files in files_by_format(options).items():
        cells = []
        for read in (decode, lambda data: transform(decode(data))):
            found = median_times(read, files, options.repeats)
            cells += [f"{found['pillow']:.2f}", f"{found['torchcodec']:.2f}"]
            cells.append(f"{found['pillow'] / found['torchcodec']:.2f}")
        worst = 0
        for data in files:
            with decoding_by("torchcodec"):
                other = np.asarray(decode(data), dtype=int)
            worst = max(worst, int(np.abs(np.asarray(decode(data), dtype=int) - other).max()))
        sys.stdout.write(f"| {kind} | {' | '.join(cells)} | {worst} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
