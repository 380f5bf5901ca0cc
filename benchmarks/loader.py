"""The training loader against a plain loop: the same transform on the same files, images per second and worker.

    python benchmarks/loader.py                              # generated images, as files and as Parquet
    python benchmarks/loader.py --files FOLDER_OR_PARQUET    # a folder with metadata.jsonl, or a Parquet file

The plain loop opens images with Pillow, converts them to RGB, applies ALBEF's training transform, and tokenizes
captions batch by batch, in a torch `DataLoader` (with 0 workers a for-loop). It holds the rows in memory, has no checks
and no counts, and cannot resume. Both loaders shuffle, drop the incomplete batch and keep their workers.

A pass is an epoch, from the creation of the iterator to the last batch; the first pass of each, which starts the
workers, is not counted. The passes of both are interleaved, so that drift of the machine's speed affects both alike; a
ratio is the median over neighbouring passes. Each process, including the main process, computes in one thread.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import disable_progress_bars
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vlightning.datamodules import ALBEFTrainTransform, ImageTextDataModule

Row = tuple[str | bytes, list[str]]  # path or encoded image, captions
WORDS = ("red", "round", "small", "table", "garden", "two", "people", "near", "old", "house", "with", "a", "dog")


class PlainRows(Dataset[tuple[Tensor, str]]):
    """A dataset without checks."""

    def __init__(self, rows: list[Row], transform: ALBEFTrainTransform) -> None:
        self.rows = rows
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        encoded, captions = self.rows[index]
        image = Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded).convert("RGB")
        return self.transform(image), random.choice(captions)


class PlainCollate:
    """Stack the images and tokenize the captions."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.options = {"padding": True, "truncation": True, "max_length": max_tokens, "return_tensors": "pt"}
        self.tokenizer = tokenizer

    def __call__(self, samples: list[tuple[Tensor, str]]) -> dict[str, Tensor]:
        """Make a batch."""
        images, captions = zip(*samples, strict=True)
        tokens = self.tokenizer(list(captions), **self.options)
        return {"image": torch.stack(images), **{key: tokens[key] for key in ("input_ids", "attention_mask")}}


class PlainLoop:
    """Batches in the main process, without a loader."""

    def __init__(self, dataset: PlainRows, collate: PlainCollate, batch_size: int) -> None:
        self.dataset, self.collate, self.batch_size = dataset, collate, batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(self.dataset)).tolist()
        for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
            yield self.collate([self.dataset[index] for index in order[start : start + self.batch_size]])


def draw_images(folder: Path, count: int) -> tuple[Path, Path]:
    """Generate images of about 500 x 375 pixels with the detail of a photograph, and write files and Parquet."""
    numbers = np.random.default_rng(0)
    names, captions, encoded = [], [], []
    for number in range(count):
        width, height = (int(numbers.integers(least, least + 100)) for least in (450, 325))
        image = Image.new("RGB", (width, height))
        for cells in (4, 24, 120):  # noise from coarse to fine, each half as strong as the last
            noise = Image.fromarray(numbers.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            image = Image.blend(image, noise.resize(image.size, Image.Resampling.BICUBIC), 0.9 if cells == 4 else 0.25)
        draw = ImageDraw.Draw(image)
        for _ in range(8):
            left, top, size = (int(numbers.integers(0, limit)) for limit in (width, height, 150))
            draw.ellipse((left, top, left + size, top + size), fill=tuple(numbers.integers(0, 256, 3).tolist()))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        names.append(f"{number:04}.jpg")
        captions.append([" ".join(numbers.choice(WORDS, 11).tolist()) for _ in range(2)])
        encoded.append(buffer.getvalue())
    files, table = folder / "files", folder / "pairs.parquet"
    files.mkdir()
    for name, data in zip(names, encoded, strict=True):
        (files / name).write_bytes(data)
    lines = [json.dumps({"file_name": name, "caption": texts}) for name, texts in zip(names, captions, strict=True)]
    (files / "metadata.jsonl").write_text("\n".join(lines))
    images = [{"bytes": data, "path": name} for name, data in zip(names, encoded, strict=True)]
    pq.write_table(pa.table({"image": images, "caption": captions}), table, row_group_size=100)
    return files, table


def read_rows(source: Path) -> list[Row]:
    """Read all rows of a Parquet file, or of a folder with `metadata.jsonl`."""
    if source.is_dir():
        items = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
        return [(str(source / item["file_name"]), _listed(item["caption"])) for item in items]
    items = pq.read_table(source, columns=["image", "caption"]).to_pylist()
    return [(item["image"]["bytes"], _listed(item["caption"])) for item in items]


def _listed(caption: str | list[str]) -> list[str]:
    return [caption] if isinstance(caption, str) else caption


def cpu_seconds() -> float:
    """Return the processor time of this process and, if `/proc` exists, of its running workers."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat")
        if fields.exists():
            ticks += sum(int(field) for field in fields.read_text().rpartition(")")[2].split()[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def time_pass(loader: Iterable[Any], batches: int) -> tuple[float, float]:
    """Run one epoch, and return the seconds of wall time and of processor time."""
    cpu, start = cpu_seconds(), time.perf_counter()
    seen = sum(1 for _ in loader)
    elapsed = time.perf_counter() - start, cpu_seconds() - cpu
    assert seen == batches, f"Expected {batches} batches, got {seen}"
    return elapsed


def compare(source: Path, workers: int, arguments: argparse.Namespace, cache: str) -> str:
    """Measure both loaders on one source, and return a line of the table."""
    data = ImageTextDataModule(
        train=str(source),
        batch_size=arguments.batch_size,
        num_workers=workers,
        image_size=arguments.size,
        seed=0,
        cache_dir=cache,
    )
    data.setup("fit")
    rows = PlainRows(read_rows(source), ALBEFTrainTransform(arguments.size))
    collate = PlainCollate(data.tokenizer, data.max_tokens)
    plain: Iterable[Any] = PlainLoop(rows, collate, arguments.batch_size)
    if workers:
        plain = DataLoader(
            rows,
            arguments.batch_size,
            collate_fn=collate,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=True,
        )
    loaders = {"plain": plain, "module": data.train_dataloader()}
    batches = len(rows) // arguments.batch_size
    passes: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for turn in range(arguments.repeats + 1):
        for name in sorted(loaders, reverse=bool(turn % 2)):
            passes[name].append(time_pass(loaders[name], batches))
    data.teardown("fit")
    seconds = {name: np.array(pairs[1:]) for name, pairs in passes.items()}  # [repeats, (wall, processor)]
    images = batches * arguments.batch_size
    rate = {name: images / max(workers, 1) / np.median(pairs[:, 0]) for name, pairs in seconds.items()}
    cost = {name: 1000 / images * np.median(pairs[:, 1]) for name, pairs in seconds.items()}
    ratio = np.median(seconds["plain"] / seconds["module"], axis=0)
    return (
        f"{'files' if source.is_dir() else 'Parquet':8} {workers:7} "
        f"{rate['plain']:9.1f} {rate['module']:9.1f} {ratio[0]:6.2f} "
        f"{cost['plain']:9.2f} {cost['module']:9.2f} {ratio[1]:6.2f}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, help="folder with metadata.jsonl, or Parquet file with the images in it")
    parser.add_argument("--size", type=int, default=224, help="side of the transformed images, pixels")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="numbers of loader workers")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7, help="counted passes of each")
    parser.add_argument("--images", type=int, default=384, help="number of generated images")
    arguments = parser.parse_args()
    disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sources = [arguments.files] if arguments.files else draw_images(Path(folder), arguments.images)
        print(
            f"{torch.get_num_threads()} thread in each process, torch {torch.__version__}; ALBEF's training transform "
            f"at {arguments.size} px, batches of {arguments.batch_size};\nmedians of {arguments.repeats} passes, "
            "ratio: speed of the datamodule's loader over that of the plain loop"
        )
        print(f"{'':16} {'images/s per worker':>26} {'processor ms per image':>26}")
        heads = (f"{name:>{width}}" for name, width in 2 * (("plain", 9), ("module", 9), ("ratio", 6)))
        print(f"{'source':8} {'workers':>7}", *heads)
        for source in sources:
            for workers in arguments.workers:
                print(compare(source, workers, arguments, folder), flush=True)


if __name__ == "__main__":
    main()
