"""Streams: how well they are shuffled, and how fast they are read, on disks and with a slow storage.

    python benchmarks/streams.py --only shuffle                 # distances, and a training on sorted rows
    python benchmarks/streams.py --only rate --before TREE      # beside the code of another checkout

*Distances*: of 100 shards with 1,000 rows each, batches of 64. The number of a row is its place in all shards together;
the distance of neighbours in a batch is that of their numbers. Beside it how many of the 64 rows have another row of
their batch within 50 places. The full shuffle is a permutation of all rows; "consecutive blocks" shuffles 1,024 rows
that follow each other in a shard, as release 0.2 did in each loader worker.

*Training on sorted rows*: softmax regression on 100,000 points of 100 classes, sorted by class, so that a shard has
one class; two epochs of SGD whose learning rate decays to 0. Accuracy on other points of the same classes, mean and
deviation over seeds.

*Rate*: samples per second of the training loader of `ImageTextDataModule` without workers, in one thread: decoding,
transform and captions included. Passes of all readers are interleaved; a ratio is the median over neighbouring passes.
The slow storage waits 0.1 seconds for each request.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
SHARDS, ROWS, BATCH, NEAR, CLASSES, EPOCHS = 100, 1000, 64, 50, 100, 2
DELAY = 0.1
"""Seconds that a request of the slow storage takes."""


# Shuffle


class Numbered:
    """Shards with equally many rows, as `StreamOrder` needs them."""

    def __init__(self, groups: int | None = None) -> None:
        from vlightning.datamodules.base.mixing import Mix

        self.mix = Mix([SHARDS])
        self.groups = groups

    def count(self, shard: int) -> int:
        """Return the number of rows."""
        return ROWS

    def chunk_starts(self, shard: int) -> np.ndarray | None:
        """Return the first rows of the row groups; None for tar files."""
        return None if self.groups is None else np.arange(0, ROWS, self.groups)

    def is_sequential(self, shard: int) -> bool:
        """Return False."""
        return False


def streamed(seed: int, epoch: int, groups: int | None = None, block: int = 1024) -> np.ndarray:
    """Return the numbers of the rows of an epoch of a stream, int64 [batches, rows per batch]."""
    from vlightning.datamodules.streams.order import StreamOrder

    order = StreamOrder(Numbered(groups), seed, epoch, SHARDS * ROWS // BATCH, BATCH, block)
    batches = np.empty((order.batches, BATCH), np.int64)
    for first in range(0, order.batches, order.depth):
        _, _, depth = order.block_of(first)
        rows = np.concatenate(
            [run.shard * ROWS + np.arange(run.start, run.stop) for run in order.runs(first, range(BATCH))]
        )
        chosen = np.arange(BATCH)[:, None] * depth + order.places(first)
        batches[first : first + depth] = rows[chosen].T
    return batches


def full(seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of all rows in batches."""
    order = np.random.default_rng((seed, epoch)).permutation(SHARDS * ROWS)
    return order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)


def consecutive(seed: int, epoch: int) -> np.ndarray:
    """Return shards in random order whose rows are shuffled in blocks of 1,024, in batches."""
    draw = np.random.default_rng((seed, epoch))
    rows = np.concatenate([shard * ROWS + np.arange(ROWS) for shard in draw.permutation(SHARDS).tolist()])
    order = np.concatenate([draw.permutation(rows[start : start + 1024]) for start in range(0, len(rows), 1024)])
    return order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)


ORDERS = {
    "full shuffle": full,
    "stream of tar files": streamed,
    "stream of Parquet, row groups of 100": lambda seed, epoch: streamed(seed, epoch, 100),
    "the same, blocks of 8,192": lambda seed, epoch: streamed(seed, epoch, 100, 8192),
    "consecutive blocks": consecutive,
}


def distances(batches: np.ndarray) -> dict[str, float]:
    """Return quantiles of the distance of neighbours in a batch, and the rows that have another one nearby."""
    apart = np.abs(np.diff(batches, axis=1)).ravel()
    ordered = np.sort(batches, axis=1)
    near = np.diff(ordered, axis=1) <= NEAR
    beside = np.zeros(batches.shape, bool)
    beside[:, 1:] |= near
    beside[:, :-1] |= near
    quantiles = {f"{percent}%": float(np.percentile(apart, percent)) for percent in (10, 50, 90)}
    shards = float(np.mean([len(np.unique(batch)) for batch in batches // ROWS]))
    return quantiles | {
        "mean": float(apart.mean()),
        "near": float(beside.sum(1).mean()),
        "shards": float(np.mean(shards)),
    }


def accuracy(epochs: list[np.ndarray], seed: int) -> float:
    """Return the accuracy of softmax regression after some epochs on rows that are sorted by class."""
    draw = np.random.default_rng(seed)
    centers = draw.standard_normal((CLASSES, 32)).astype(np.float32)
    labels = np.arange(SHARDS * ROWS) // (SHARDS * ROWS // CLASSES)
    points = centers[labels] + 1.5 * draw.standard_normal((len(labels), 32), np.float32)
    held_out = np.arange(CLASSES).repeat(100)
    tests = centers[held_out] + 1.5 * draw.standard_normal((len(held_out), 32), np.float32)
    weight = np.zeros((32, CLASSES), np.float32)
    momentum = np.zeros_like(weight)
    steps = np.concatenate(epochs)
    rows = np.arange(BATCH)
    for step, batch in enumerate(steps):
        scores = points[batch] @ weight
        scores = np.exp(scores - scores.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
        scores[rows, labels[batch]] -= 1
        momentum = 0.9 * momentum + points[batch].T @ scores / BATCH
        weight -= 0.1 * (1 - step / len(steps)) * momentum
    return float(((tests @ weight).argmax(1) == held_out).mean())


def print_shuffle(seeds: int) -> None:
    """Print the tables of distances and accuracies."""
    print("| order | 10% | median | 90% | mean distance | rows with a near one | shards of a batch | accuracy |")
    print("|---|---|---|---|---|---|---|---|")
    for name, order in ORDERS.items():
        found = distances(order(0, 1))
        rates = [accuracy([order(seed, epoch) for epoch in range(EPOCHS)], seed) for seed in range(seeds)]
        numbers = [f"{found[key]:,.0f}" for key in ("10%", "50%", "90%", "mean")]
        numbers += [f"{found['near']:.1f}", f"{found['shards']:.1f}"]
        print(f"| {name} | {' | '.join(numbers)} | {np.mean(rates):.4f} ± {np.std(rates):.4f} |", flush=True)


# Rate


def write(folder: Path, shards: int, rows: int, side: int = 256) -> None:
    """Write tar and Parquet files of generated photographs."""
    draw = np.random.default_rng(0)
    low = [draw.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(16)]
    images = []
    for pixels in low:
        buffer = io.BytesIO()
        noise = draw.normal(0, 8, (side, side, 3))
        smooth = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC), np.float64)
        Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        images.append(buffer.getvalue())
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for row in range(rows):
                parts = (("jpg", images[row % len(images)]), ("txt", f"a photograph of row {row}".encode()))
                for kind, content in parts:
                    info = tarfile.TarInfo(f"{shard:03}{row:05}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        columns = {
            "image": [{"bytes": images[row % len(images)], "path": None} for row in range(rows)],
            "caption": [f"a photograph of row {row}" for row in range(rows)],
        }
        pq.write_table(pa.table(columns), folder / f"{shard:03}.parquet", row_group_size=100)


def serve(folder: str, samples: int, sources: list[str]) -> None:
    """Read an epoch of a source for each number in the standard input, and print the seconds that it took."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class SlowFiles(LocalFileSystem):  # type: ignore[misc]
        """Files of a disk, each request of which takes `DELAY`."""

        protocol = "slow"

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            return "/" + str(path).removeprefix("slow://").lstrip("/")

        def info(self, path: str, **options: Any) -> Any:
            time.sleep(DELAY)
            return super().info(path, **options)

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
            time.sleep(DELAY)
            return super().cat_file(path, start, end, **options)

    fsspec.register_implementation("slow", SlowFiles, clobber=True)
    torch.set_num_threads(1)
    from vlightning.datamodules import ImageTextDataModule

    loaders = []
    for source in sources:
        data = ImageTextDataModule(
            train=source,
            streaming=True,
            samples_per_epoch=samples,
            batch_size=BATCH,
            num_workers=0,
            image_size=128,
            tokenizer="clip",
            vocab_size=49408,
            max_tokens=16,
            cache_dir=folder,
        )
        data.setup("fit")
        loaders.append((data, data.train_dataloader()))
    for number in sys.stdin:
        start = time.perf_counter()
        count = sum(len(batch["image"]) for batch in loaders[int(number)][1])
        print(f"{time.perf_counter() - start} {count}", flush=True)


@contextlib.contextmanager
def reader(tree: Path, sources: list[str], folder: Path, samples: int) -> Iterator[Any]:
    """Start a process that reads with the code of a checkout; yield a function that returns its rate of a source."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    (packages / "vlightning").symlink_to(tree)
    words = [sys.executable, __file__, "--serve", str(folder / "cache"), str(samples), *sources]
    environment = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None

    def rate(number: int) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        print(number, file=process.stdin, flush=True)
        seconds, count = process.stdout.readline().split()
        return int(count) / float(seconds)

    try:
        yield rate
    finally:
        process.stdin.close()
        process.wait()


def print_rates(before: Path | None, passes: int, shards: int, rows: int, samples: int) -> None:
    """Print the rates of readers in interleaved passes, and their ratios."""
    trees = {"now": ROOT} | ({"before": before.resolve()} if before is not None else {})
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        write(folder, shards, rows)
        places = [(kind, storage) for kind in ("tar", "parquet") for storage in ("disk", "slow storage")]
        starts = {"disk": "", "slow storage": "slow://"}
        sources = [f"{starts[storage]}{folder}/*.{kind}" for kind, storage in places]
        readers = {
            tree: stack.enter_context(reader(path, sources, folder / tree, samples)) for tree, path in trees.items()
        }
        rates: dict[tuple[str, str, str], list[float]] = {}
        for number in range(passes + 1):  # the first one counts the rows of tar files
            for place_number, (kind, storage) in enumerate(places):
                for tree, rate in readers.items():
                    found = rate(place_number)
                    if number:
                        rates.setdefault((tree, kind, storage), []).append(found)
                    else:
                        print(json.dumps({"first pass": [tree, kind, storage], "samples/s": round(found, 1)}))
        print("| reader | files | storage | samples/s | beside before | beside disk |")
        print("|---|---|---|---|---|---|")
        for (tree, kind, storage), several in rates.items():
            others = [rates.get(("before", kind, storage)), rates[tree, kind, "disk"]]
            ratios = [
                "-" if other is None else f"{statistics.median(a / b for a, b in zip(several, other, strict=True)):.3f}"
                for other in others
            ]
            print(f"| {tree} | {kind} | {storage} | {statistics.median(several):.1f} | {' | '.join(ratios)} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("shuffle", "rate"))
    parser.add_argument("--before", type=Path, help="a checkout whose reader is measured beside this one")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--rows", type=int, default=256, help="rows per shard")
    parser.add_argument("--samples", type=int, default=2048, help="samples per pass")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        folder, samples, *sources = options.serve
        serve(folder, int(samples), sources)
        return
    if options.only != "rate":
        print_shuffle(options.seeds)
    if options.only != "shuffle":
        print_rates(options.before, options.passes, options.shards, options.rows, options.samples)


if __name__ == "__main__":
    main()
