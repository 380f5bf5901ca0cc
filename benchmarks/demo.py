"""Time of the demo's answers in a folder of many images.

    python benchmarks/demo.py
    python benchmarks/demo.py --images 100000 --model ViT-B-16

The embeddings are random, and so are the weights of the model, one of open_clip's, which no time depends on. The folder
has as many files as images, but `--files` different ones: smooth JPEG images of `--side` pixels, which compress as
photographs do. Medians of `--rounds` texts, each another, so that no image was shown before:

- text: tokenizer and text tower;
- search: cosines with all images, and the best of them;
- images: reading, decoding and resizing of those that are shown;
- answer: all of this, and the HTML that the page gets;
- describe: captions of a dropped image, from as many captions as images.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import write_model
from latency import device_name
from PIL import Image
from torch.nn.functional import normalize

from vlightning.commands.demo import folder as folders
from vlightning.commands.demo.folder import ImageFolder, read_folder
from vlightning.commands.demo.index import Index
from vlightning.commands.demo.rendering import grid
from vlightning.commands.demo.search import SHOWN, Search


def write_images(root: Path, images: int, files: int, side: int) -> ImageFolder:
    """Write images, of which only some differ, and return their folder."""
    draws = np.random.default_rng(0)
    root.mkdir()
    for number in range(images):
        path = root / f"{number:06}.jpg"
        if number < files:
            coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            coarse.resize((side, side * 3 // 4), Image.Resampling.BICUBIC).save(path, quality=90)
        else:
            os.link(root / f"{number % files:06}.jpg", path)
    return read_folder(str(root))


def embeddings(images: int, width: int) -> torch.Tensor:
    """Return random unit-length embeddings [images, width]."""
    return normalize(torch.randn(images, width, generator=torch.Generator().manual_seed(0)), dim=-1)


def parts(search: Search) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    texts: Iterator[str] = (f"a photo of the thing {number}" for number in itertools.count())
    names: Iterator[list[str]] = itertools.cycle(map(list, zip(*[iter(search.folder.names)] * SHOWN, strict=False)))
    query, file = search.model.encode_texts(["a photo"])[0], str(search.folder.path(search.folder.names[0]))
    return {
        "text": lambda: search.model.encode_texts([next(texts)]),
        "search": lambda: search.images.best(query, SHOWN),
        "images": lambda: [folders.small(search.folder, name, 480) for name in next(names)],
        "answer": lambda: grid(search.find(next(texts))),
        "describe": lambda: search.describe(file),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32", help="a name of open_clip's")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=200, help="different images")
    parser.add_argument("--side", type=int, default=1024, help="longer side of the images in pixels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    typed = parser.parse_args()
    torch.set_num_threads(typed.threads)
    with tempfile.TemporaryDirectory() as work:
        model = write_model(Path(work) / "model", typed.model)
        folder = write_images(Path(work) / "images", typed.images, typed.files, typed.side)
        width = model.encode_texts(["a photo"]).shape[1]
        captions = [f"a caption {number}" for number in range(typed.images)]
        known = embeddings(typed.images, width)
        search = Search(model, folder, Index(folder.names, known), Index(captions, known))
        print(f"{typed.images:,} images, {typed.model}, {device_name(model.device)}, {typed.threads} threads, ms")
        for name, part in parts(search).items():
            part()
            taken = []
            for _ in range(typed.rounds):
                start = time.perf_counter()
                part()
                taken.append(time.perf_counter() - start)
            print(f"{name:<10}{1000 * statistics.median(taken):>8.1f}{1000 * max(taken):>8.1f} at most")


if __name__ == "__main__":
    main()
