"""Trainings from a store against trainings that run the locked tower, and the memory of a search.

    python benchmarks/embed.py train
    python benchmarks/embed.py search --rows 100000 1000000

`train`: one model of open_clip's with random weights, drawn JPEG images with captions, and batches as
`ImageTextDataModule` reads them. Ways:

- image tower locked: the text tower trains;
- text tower locked: the image tower trains;
- both locked: a layer of the embedding dimension on each side trains, as the projections of two towers that were not
  trained together.

Seconds of `--batches` batches with loading, forward and backward passes, without and with a store of plain views,
interleaved, medians of `--repeats`; the pass of `vlightning embed` apart, in seconds of a row. `--pairs` and `--epochs`
scale them to a run.

`search`: a store of drawn features is written, and `vlightning search` with a text runs in a process of its own, exact
and by an index of usearch: its peak memory (resident set, mapped pages and the model included), also of the first
search, which makes the index, beside those in ten rows, which are what the libraries and the model need; the recall
that it prints; and milliseconds of a query with everything loaded.
"""

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import write_model
from PIL import Image
from timing import medians
from torch import nn
from torch.nn.functional import normalize

from vlightning.commands.embed.command import run_embed
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.search.index import StoreSearch
from vlightning.common.manifest import write_manifest
from vlightning.datamodules import ImageTextDataModule
from vlightning.datamodules.pairs.samples import TrainingCollate
from vlightning.datamodules.pairs.stored import StoredReader, StoredRows, StoredSet
from vlightning.datamodules.stores.shards import ShardRows, shard_path, write_shard
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules import CLIPModule

WAYS = {
    "image tower locked": ({"lock_image": "all"}, ["image"]),
    "text tower locked": ({"lock_text": "all"}, ["text"]),
    "both locked": ({"lock_image": "all"}, ["image", "text"]),
}


def write_pairs(folder: Path, pairs: int, side: int) -> Path:
    """Write smooth JPEG images, which compress as photographs do, and return their table."""
    draws = np.random.default_rng(0)
    lines = ["image,caption"]
    for number in range(pairs):
        coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        coarse.resize((side, side * 3 // 4), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
        lines.append(f"{number}.jpg,a picture of the thing {number} beside another one")
    table = folder / "pairs.csv"
    table.write_text("\n".join(lines) + "\n")
    return table


def batches(data: ImageTextDataModule, store: FeatureStore | None, towers: list[str], size: int) -> Iterator[Any]:
    """Yield training batches without end, with features of the towers from a store if there is one."""
    rows = data.opened_rows("train")
    if store is None:
        dataset: Any = data.training_set(rows)
        collate: Any = data.training_collate()
    else:
        stored = StoredRows(store, towers)
        reader = StoredReader(rows, data.worker_transform(training=True), data.encoder(), stored)
        dataset = StoredSet(len(rows), reader, 0)
        collate = TrainingCollate(data.encoder(), stored.widths)
    for number in itertools.count():
        keys = [(0, (number * size + item) % len(rows)) for item in range(size)]
        yield data.normalized_batch(collate(dataset.__getitems__(keys)).batch, training=True)


def step(module: Any, heads: nn.ModuleDict | None, batch: dict[str, torch.Tensor]) -> None:
    """Do the forward and the backward pass of a training step, and drop the gradients."""
    if heads is None:
        module.training_step(batch, 0)["loss"].backward()
    else:
        with torch.no_grad():
            student = module.student
            image = batch["image_features"] if "image_features" in batch else student.encode_image(batch["image"])
            text = batch["text_features"] if "text_features" in batch else student.encode_text(batch["input_ids"])
        unit = [normalize(heads[name](rows), dim=-1) for name, rows in (("image", image), ("text", text))]
        logits = module.student.logit_scale.exp() * unit[0] @ unit[1].T
        target = torch.arange(len(logits))
        (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)).backward()
    module.zero_grad()


def train(typed: argparse.Namespace) -> None:
    """Print the table of trainings."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_model(work / "model", typed.model)
        (work / "data").mkdir()
        table = write_pairs(work / "data", typed.written, typed.side)
        began = time.perf_counter()
        words = [f"--data.train={table}", f"--output={work / 'store'}", "--num_workers=0", "--accelerator=cpu"]
        run_embed([f"local-dir:{work / 'model'}", *words, f"--batch_size={typed.batch}"])
        row = (time.perf_counter() - began) / typed.written
        store = FeatureStore(work / "store")
        options = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": 77, "image_size": typed.size}
        data = ImageTextDataModule(train=str(table), num_workers=0, batch_size=typed.batch, **options)
        data.prepare_data()
        data.setup("fit")
        print(f"{typed.model}, batches of {typed.batch}, {torch.get_num_threads()} threads, CPU; {typed.pairs:,} pairs")
        print(f"embed: {1000 * row:.1f} ms a row, {row * typed.pairs:.0f} s for all")
        print(f"{'':<22}{'s a batch':>10}{'stored':>10}{'times':>8}{f'{typed.epochs} epochs, s':>14}{'stored':>10}")
        for way, (tuning, towers) in WAYS.items():
            module = CLIPModule(weights=str(work / "model"), tuning=tuning)
            module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
            width = store.width("image")
            both = len(towers) == 2
            heads = nn.ModuleDict({side: nn.Linear(width, width) for side in ("image", "text")}) if both else None
            ways = {
                kind: _run(module, heads, batches(data, kept, towers, typed.batch), typed.batches)
                for kind, kept in (("plain", None), ("stored", store))
            }
            taken = {kind: seconds / typed.batches for kind, seconds in medians(ways, typed.repeats).items()}
            steps = typed.epochs * (typed.pairs // typed.batch)
            times = taken["plain"] / taken["stored"]
            print(
                f"{way:<22}{taken['plain']:>10.3f}{taken['stored']:>10.4f}{times:>8.1f}"
                f"{steps * taken['plain']:>14.0f}{steps * taken['stored']:>10.0f}"
            )


def _run(module: Any, heads: nn.ModuleDict | None, source: Iterator[Any], count: int) -> Callable[[], None]:
    def run() -> None:
        for batch in itertools.islice(source, count):
            step(module, heads, batch)

    return run


def write_store(folder: Path, rows: int, typed: argparse.Namespace, model: dict[str, Any]) -> None:
    """Write a store of drawn features, of no data.

    Args:
        folder: an existing folder.
        rows: number of rows.
        typed: the parsed arguments: `width` numbers of a row vary in `factors` directions, and a little in the others.
        model: the manifest's record of the model.
    """
    shard = 10_000
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(typed.factors, typed.width, generator=generator)
    sizes = [min(shard, rows - start) for start in range(0, rows, shard)]
    for number, size in enumerate(sizes):
        names = [f"/photos/{number * shard + row:08}.jpg" for row in range(size)]
        features = torch.randn(size, typed.factors, generator=generator) @ directions
        features = features / typed.factors**0.5 + 0.3 * torch.randn(size, typed.width, generator=generator)
        nothing: list[Any] = [None] * size
        write_shard(
            shard_path(folder, number), ShardRows(names, list(range(size)), nothing, nothing, features[:, None])
        )
    images = {"views": 0, "projected": True, "width": typed.width, "preprocessing": ""}
    manifest = {"model": model, "data": {"rows": [rows], "shard_size": shard}, "images": images, "texts": None}
    write_manifest(folder / "manifest.json", manifest, complete=True)


COMMAND = """
import sys
from pathlib import Path
from vlightning.cli import main
try:
    main()
finally:
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) / 1000)
"""


def command(words: list[str]) -> tuple[float, str]:
    """Run `vlightning` in a process of its own; return its peak memory in MB, and its output.

    The peak is read from Linux by the process itself: `ru_maxrss` is at least that of the process that started it.
    """
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], check=True, capture_output=True, text=True)
    *_, peak = done.stdout.splitlines()
    return float(peak), done.stdout


def search(typed: argparse.Namespace) -> None:
    """Print the table of searches."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_model(work / "model", typed.model)
        source = f"local-dir:{work / 'model'}"
        loaded = load_model(source)
        model = {"name": typed.model, "model": source, "weights": source, "sha256": loaded.sha256}
        model |= loaded.tower_digests()
        print(f"{typed.model}; {typed.width} numbers a row, of {typed.factors} factors")
        print(f"{'rows':>10}  {'method':<8}{'peak MB':>10}{'first, MB':>10}{'ms a query':>12}  recall at 10")
        for rows in (10, *typed.rows):
            folder = work / "store"
            folder.mkdir()
            write_store(folder, rows, typed, model)
            for method in typed.methods:
                words = ["search", str(folder), "a dog on a beach", f"--method={method}"]
                first, output = command(words)  # makes an index
                peak, output = command(words)
                recall = "exact" if method == "exact" else output.partition("exact search: ")[2].split()[0].rstrip(".")
                timed = [sys.executable, __file__, "one", "--store", str(folder), "--methods", method]
                done = subprocess.run(timed, check=True, capture_output=True, text=True)
                taken = float(done.stdout.splitlines()[-1])
                print(f"{rows:>10,}  {method:<8}{peak:>10.0f}{first:>10.0f}{taken:>12.1f}  {recall}", flush=True)
            shutil.rmtree(folder)


def one(typed: argparse.Namespace) -> None:
    """Print the milliseconds of a search in a store, in this process."""
    store = StoreSearch(FeatureStore(typed.store), "image", typed.methods[0])
    queries = normalize(torch.randn(10, store.store.width("image")), dim=-1)
    store.search(queries[:1], 10)
    began = time.perf_counter()
    for query in queries:
        hits = store.search(query[None], 10)
        [store.store.name(row) for row in hits.row[0].tolist()]
    print(1000 * (time.perf_counter() - began) / len(queries))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "search", "one"), help="one: a search in a process of its own")
    parser.add_argument("--model", default="ViT-B-32", help="a name of open_clip's")
    parser.add_argument("--size", type=int, default=224, help="side of the model's images in pixels")
    parser.add_argument("--side", type=int, default=512, help="longer side of the files in pixels")
    parser.add_argument("--pairs", type=int, default=5000, help="pairs of the run that times are scaled to")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--written", type=int, default=256, help="pairs that are written")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--width", type=int, default=512, help="dimension of the model's features")
    parser.add_argument("--factors", type=int, default=64, help="directions in which most of the features vary")
    parser.add_argument("--methods", nargs="+", default=["exact", "index"], choices=("exact", "index"))
    parser.add_argument("--store", help="of one")
    typed = parser.parse_args()
    {"train": train, "search": search, "one": one}[typed.what](typed)


if __name__ == "__main__":
    main()
