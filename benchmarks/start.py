"""Rows per second of a first start on a list of pairs, by format, beside a reader of single rows; or on tar files.

    python benchmarks/start.py
    python benchmarks/start.py --rows 1000000
    python benchmarks/start.py --tars 1200 --samples 10000
    python benchmarks/start.py --fit configs/albef/quickstart.yaml

A list of pairs with captions of 12 words and ids is written in each format. "before" is the reader of single rows with
`datasets.Dataset.from_generator`, on at most `--rows-before` rows; "after" opens the list as a datamodule does: it is
read in blocks, checked by column, and written to an Arrow file. Its parts are printed in seconds: reading and writing,
the table with its ids, all texts (as for a tokenizer's training), the rows of each image (as for an evaluation), and a
later start, which finds the file. Times are CPU seconds of one thread, so that other processes on the machine change
them little.

With `--tars N`, N tar files of reinforced pairs are indexed: each is the same sparse file, under another name, whose
members have headers and no content, so that reading the disk takes no time. Printed are seconds of a first and a
later start, in CPU time of all processes and on the clock, beside the reader of the library on one file.

With `--fit` a config is started until its first step is done, twice: once with the interpreter's times of imports, and
once under a profiler, whose shares divide the rest. CPU seconds of one thread by package are printed.
"""

import argparse
import csv
import json
import os
import random
import re
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from vlightning.datamodules.base.decode import MAX_PIXELS
from vlightning.datamodules.reading.layout import RECORD
from vlightning.datamodules.reading.lists import read_list
from vlightning.datamodules.reading.open import Opening
from vlightning.datamodules.reading.shards import Shards
from vlightning.datamodules.reading.table import PairTable
from vlightning.datamodules.reading.tar import sample_spans

FORMATS = ("json", "jsonl", "csv")
WORDS = ("a", "the", "dog", "cat", "runs", "over", "big", "small", "house", "tree", "red", "blue", "on", "photo", "man")


def write_list(file: Path, rows: int) -> None:
    """Write a list of pairs in the format of the file's suffix."""
    draws = random.Random(0)
    items = (
        {"image": f"images/{row:08d}.jpg", "caption": " ".join(draws.choices(WORDS, k=12)), "image_id": row}
        for row in range(rows)
    )
    with file.open("w", newline="") as content:
        if file.suffix == ".csv":
            writer = csv.DictWriter(content, ["image", "caption", "image_id"])
            writer.writeheader()
            writer.writerows(items)
            return
        between = ", " if file.suffix == ".json" else "\n"
        content.write("[" if file.suffix == ".json" else "")
        for number, item in enumerate(items):
            content.write((between if number else "") + json.dumps(item))
        content.write("]" if file.suffix == ".json" else "\n")


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and its CPU seconds."""
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def row_by_row(file: Path, cache: str) -> Any:
    """Convert a list as it was before there were blocks."""
    features = datasets.Features.from_arrow_schema(RECORD)
    arguments = {"files": [str(file)], "image": "image", "caption": "caption", "image_id": None}
    return datasets.Dataset.from_generator(read_list, features=features, gen_kwargs=arguments, cache_dir=cache)


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rows-before", type=int, default=100_000)
    parser.add_argument("--tars", type=int, help="number of tar files, in place of lists")
    parser.add_argument("--samples", type=int, default=10_000, help="of a tar file")
    parser.add_argument("--fit", help="a config that is started until its first step, in place of lists")
    given = parser.parse_args()
    if given.tars:
        measure_tars(given.tars, given.samples)
        return
    if given.fit:
        measure_fit(given.fit)
        return
    pa.set_cpu_count(1)
    datasets.disable_progress_bars()
    print(f"{'':<8}{'before':>12}{'after':>12}{'':>8}{'read':>8}{'table':>8}{'texts':>8}{'images':>8}{'later':>8}")
    print(f"{'':<8}{'rows/s':>12}{'rows/s':>12}{'times':>8}{'s':>8}{'s':>8}{'s':>8}{'s':>8}{'s':>8}")
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            few = Path(folder) / f"few.{name}"
            count = min(given.rows, given.rows_before)
            write_list(few, count)
            before = count / timed(partial(row_by_row, few, folder))[1]
            file = Path(folder) / f"pairs.{name}"
            write_list(file, given.rows)
            seconds = start(file, folder)
        after = given.rows / seconds[0]
        parts = "".join(f"{part:>8.2f}" for part in seconds)
        print(f"{name:<8}{before:>12,.0f}{after:>12,.0f}{after / before:>8.1f}{parts}", flush=True)


def start(file: Path, cache: str) -> tuple[float, ...]:
    """Return the CPU seconds of the parts of a start: read, table, texts, images, and a later start."""
    opening = Opening(None, "image", "caption", None, cache)
    source, read = timed(partial(opening.open, str(file), "train"))
    table, ids = timed(partial(opened_table, source))
    _, texts = timed(lambda: sum(map(len, table.texts())))
    _, images = timed(table.images)
    _, later = timed(partial(opening.open, str(file), "train"))
    return read, ids, texts, images, later


def opened_table(source: Any) -> PairTable:
    """Return the rows of an opened list after the read of an id."""
    table = PairTable([source], MAX_PIXELS)
    table.image_id(0)
    return table


MEMBERS = {"jpg": 30_000, "txt": 60, "syn.json": 400, "paug.json": 1_500, "json": 80, "npz": 122_880}
"""Sizes of the members of a reinforced pair, bytes: 40 embeddings of 1536 dimensions in 16 bits."""


def write_sparse_tar(file: Path, samples: int) -> None:
    """Write a tar file whose members are holes."""
    with file.open("wb") as content:
        for sample in range(samples):
            for kind, size in MEMBERS.items():
                header = tarfile.TarInfo(f"{sample:08d}.{kind}")
                header.size = size
                content.write(header.tobuf(tarfile.USTAR_FORMAT))
                content.seek(-(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, 1)
        content.write(bytes(2 * tarfile.BLOCKSIZE))


def measure_tars(tars: int, samples: int) -> None:
    """Print the seconds of a first and a later start on tar files."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_sparse_tar(folder / "first.tar", samples)
        files = [folder / f"{number:05d}.tar" for number in range(tars)]
        for file in files:
            file.hardlink_to(folder / "first.tar")
        _, library = timed(lambda: sum(1 for _ in sample_spans(str(folder / "first.tar"))))
        print(f"reader of the library: {samples / library:,.0f} samples/s on one core")
        for name in ("first", "later"):
            clock, cpu = time.perf_counter(), cpu_seconds()
            shards = Shards([str(file) for file in files], folder / "cache")
            random.Random(0).shuffle(order := list(range(0, len(shards), max(len(shards) // 1000, 1))))
            located = [shards.key(sample) for sample in order[:256]]
            clock, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
            print(
                f"{name} start: {len(shards):,} samples in {tars:,} files, {cpu:.1f} s of CPU "
                f"({len(shards) / cpu:,.0f} samples/s), {clock:.1f} s on the clock, a batch of {len(located)}",
                flush=True,
            )


UNTIL_FIRST_STEP = """
import cProfile, json, os, pstats, sys, time
profiled, result = sys.argv.pop(1) == "profile", sys.argv.pop(1)
from vlightning.callbacks.stopping import StopOnSignal
profile = cProfile.Profile()

def end(self, trainer, *_):
    profile.disable()
    functions = {}
    if profiled:
        for (file, _, name), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():
            if file == "~":  # of C: the time belongs to the files that call it
                for (caller, _, of), (_, _, part, _) in callers.items():
                    functions[caller] = functions.get(caller, 0.0) + (0.0 if of == "<module>" else part)
            elif name != "<module>":
                functions[file] = functions.get(file, 0.0) + own
    with open(result, "w") as file:
        json.dump({"cpu": time.process_time(), "files": functions}, file)
    sys.stderr.flush()
    os._exit(0)

StopOnSignal.on_train_batch_end = end
from vlightning.cli import main
if profiled:
    profile.enable()
main(sys.argv[1:])
"""
PACKAGES = {
    "torch": ("torch", "torchgen", "functorch"),
    "Lightning": ("lightning", "lightning_fabric", "lightning_utilities", "torchmetrics", "jsonargparse"),
    "this package": ("vlightning",),
    "networks": ("transformers", "tokenizers", "huggingface_hub", "safetensors", "timm", "open_clip", "torchvision"),
    "data": ("numpy", "pandas", "pyarrow", "datasets", "PIL", "fsspec", "scipy", "sympy"),
}


def measure_fit(config: str) -> None:
    """Print the CPU seconds until the first step of a config, by package."""
    root = str(Path(__file__).resolve().parent.parent)
    words = ["fit", f"--config={config}", "--trainer.accelerator=cpu", "--data.num_workers=0"]
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, options in (("plain", ["-X", "importtime"]), ("profile", [])):
            result = Path(folder) / f"{way}.json"
            command = [sys.executable, *options, "-c", UNTIL_FIRST_STEP, way, str(result), *words]
            more = [f"--trainer.default_root_dir={folder}", f"--trainer.logger.save_dir={folder}"]
            done = subprocess.run([*command, *more], env=os.environ | threads, capture_output=True, text=True, cwd=root)
            if not result.exists():
                raise SystemExit(done.stderr[-3000:])
            found[way] = json.loads(result.read_text()) | {"said": done.stderr}
    imports: defaultdict[str, float] = defaultdict(float)
    for own, name in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", found["plain"]["said"], re.M):
        imports[package_of(name.partition(".")[0])] += int(own) / 1e6
    running: defaultdict[str, float] = defaultdict(float)
    for file, seconds in found["profile"]["files"].items():
        inside = file.rpartition("site-packages/")[2] if "site-packages/" in file else ""
        name = "vlightning" if file.startswith(root) else inside.partition("/")[0].removesuffix(".py")
        running[package_of(name) if "importlib" not in file else ""] += seconds
    running.pop("", None)
    rest = max(found["plain"]["cpu"] - sum(imports.values()), 0.0)
    scale = rest / sum(running.values())
    print(f"until the first step of {config}: {found['plain']['cpu']:.1f} s of CPU")
    print(f"{'seconds':<16}{'imports':>10}{'running':>10}{'all':>10}")
    for name in [*PACKAGES, "others"]:
        parts = imports[name], running[name] * scale
        print(f"{name:<16}" + "".join(f"{part:>10.2f}" for part in (*parts, sum(parts))))


def package_of(name: str) -> str:
    """Return the row of the table that a top-level package belongs to."""
    return next((row for row, names in PACKAGES.items() if name in names), "others")


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
