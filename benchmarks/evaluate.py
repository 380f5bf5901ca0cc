"""Time of a zero-shot evaluation beside its parts, and time and metrics beside clip_benchmark's.

    python benchmarks/evaluate.py --model ViT-B-32 --images 512
    python benchmarks/evaluate.py --model ViT-S-32 --images 512 --clip_benchmark path/to/python
    python benchmarks/evaluate.py --model ViT-B-32 --images 8192 --device cuda --workers 16

The set is written first: random JPEG images in DataComp's layout. Each round takes, one after the other:

- decoding: reading, decoding and preprocessing of all images, by the loader workers of the engine;
- image forward: normalization and image tower, on as many batches of random bytes;
- text forward: tokenizer and text tower on the prompts of the classes;
- engine: what `vlightning evaluate` does for a set, from its files to its line of results;
- engine, classes cached: the same when the classes were encoded before;
- clip_benchmark: that package on the same files, by the Python of its environment, without the loading of the model.

The model is one of open_clip's with random weights, which no time depends on. Medians of the rounds: wall seconds, and
processor seconds of all threads and loader workers, which work of others beside the measurement changes little.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from latency import device_name
from PIL import Image
from safetensors.torch import save_file

from vlightning.commands.evaluate.encoding import Loading, batches, encode_classes
from vlightning.commands.evaluate.image_sets import ImageSet, read_prompts
from vlightning.commands.evaluate.model import ImageTextModel, load_model
from vlightning.commands.evaluate.run import Settings, evaluate
from vlightning.commands.evaluate.tasks import TASKS

TASK = TASKS["cifar10"]
_ALONE = ("decoding", "image forward", "text forward")
COMPARED = ("acc1", "acc5", "mean_per_class_recall")


def write_set(root: Path, images: int, side: int, classes: int) -> Path:
    """Write random JPEG images with smooth contents, which compress as photographs do."""
    folder = root / TASK.folder
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("\n".join(f"thing {number}" for number in range(classes)) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\nan image of {c}.\n")
    (folder / "test/nshards.txt").write_text("1\n")
    draws = np.random.default_rng(0)
    with tarfile.open(folder / "test/0.tar", "w") as tar:
        for number in range(images):
            coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            content = io.BytesIO()
            coarse.resize((side * 4 // 3, side), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
            for kind, data in (("cls", str(number % classes).encode()), ("jpg", content.getvalue())):
                info = tarfile.TarInfo(f"s{number:07}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


def write_model(folder: Path, name: str) -> ImageTextModel:
    """Write a model of open_clip's with random weights as a folder, which both packages load."""
    torch.manual_seed(0)
    network = open_clip.create_model(name)
    content = {"model_cfg": open_clip.get_model_config(name), "preprocess_cfg": network.visual.preprocess_cfg}
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    save_file(network.state_dict(), folder / "open_clip_model.safetensors")
    return load_model(f"local-dir:{folder}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32", help="a name of open_clip's")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=375, help="shorter side of the images in pixels")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of the forward passes on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clip_benchmark", help="the Python of an environment with clip_benchmark")
    typed = parser.parse_args()
    torch.set_num_threads(typed.threads)
    device = torch.device(typed.device)
    with tempfile.TemporaryDirectory() as work:
        folder = write_set(Path(work) / "sets", typed.images, typed.side, typed.classes)
        model = write_model(Path(work) / "model", typed.model)
        model.network.to(device)
        parts = _parts(model, folder, Path(work), typed)
        if typed.clip_benchmark:
            parts["clip_benchmark"] = _clip_benchmark(folder, Path(work) / "model", typed)
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
        metrics: dict[str, Any] = {}
        for _ in range(typed.rounds):
            for name, part in parts.items():
                wall, processor = time.perf_counter(), processor_seconds()
                metrics[name] = part() or {}
                both = time.perf_counter() - wall, processor_seconds() - processor
                # The other package measures itself, without its start.
                spent[name].append(metrics[name].get("seconds") or both)
                print(f"{name}: {spent[name][-1][0]:.2f} s", file=sys.stderr, flush=True)
    median, used = ({name: statistics.median(v[k] for v in values) for name, values in spent.items()} for k in (0, 1))
    print(
        f"{device_name(device)}, {typed.model}, {typed.images} images, batches of {typed.batch_size}, {typed.workers} "
        f"workers, {typed.threads} threads, median of {typed.rounds} rounds\n"
    )
    print("| part | s | images/s | of its parts | processor s | of its parts |\n|---|---:|---:|---:|---:|---:|")
    for name in parts:
        cells = [f"{median[name]:.2f}", f"{typed.images / median[name]:,.1f}", _share(name, median)]
        print(f"| {' | '.join([name, *cells, f'{used[name]:.2f}', _share(name, used)])} |")
    bare = median["image forward"] / median["engine, classes cached"]
    print(f"\nengine with cached classes at {bare:.2f} of the rate of the image forward")
    if typed.clip_benchmark:
        print("\n| metric | vlightning | clip_benchmark |\n|---|---:|---:|")
        for name in COMPARED:
            values = (metrics[package]["metrics"][name] for package in ("engine", "clip_benchmark"))
            print(f"| {name} | {' | '.join(f'{value:.6f}' for value in values)} |")


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended loader workers."""
    return sum(os.times()[:4])


def _share(name: str, seconds: dict[str, float]) -> str:
    """Return the time of a pass over that of its parts."""
    if name in _ALONE:
        return ""
    alone = _ALONE[:2] if "cached" in name else _ALONE
    return f"{seconds[name] / sum(seconds[part] for part in alone):.2f}"


def _parts(
    model: ImageTextModel, folder: Path, work: Path, typed: argparse.Namespace
) -> dict[str, Callable[[], dict[str, Any] | None]]:
    loading = Loading(typed.batch_size, typed.workers)
    prompts = read_prompts(folder)
    samples = ImageSet(folder, "test", model.transform, len(prompts.names))
    pixels = torch.randint(0, 256, (typed.batch_size, *samples[0].image.shape), dtype=torch.uint8)

    def decode() -> None:
        for _ in batches(samples, loading):
            pass

    def forward() -> None:
        on_device = pixels.to(model.device)
        features = [model.encode_images(on_device) for _ in range(typed.images // typed.batch_size)]
        torch.cat(features).cpu()  # waits for the device

    def texts() -> None:
        encode_classes(model, prompts.names, prompts.templates)

    def engine(cache: Path | None = None) -> dict[str, Any]:
        out = work / "results.jsonl"
        out.unlink(missing_ok=True)
        (result,) = evaluate(model, [TASK], Settings(folder.parent, loading, cache=cache), out)
        return {"metrics": result.metrics}

    engine(work / "cache")
    return {
        "decoding": decode,
        "image forward": forward,
        "text forward": texts,
        "engine": engine,
        "engine, classes cached": lambda: engine(work / "cache"),
    }


def _clip_benchmark(folder: Path, model: Path, typed: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    script = Path(__file__).with_name("evaluate_clip_benchmark.py")
    sizes = {"batch_size": typed.batch_size, "workers": typed.workers, "threads": typed.threads}
    words = [typed.clip_benchmark, str(script), "--model", f"local-dir:{model}", str(folder)]
    words += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]

    def run() -> dict[str, Any]:
        ran = subprocess.run(words, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])[folder.name]
        return found

    return run


if __name__ == "__main__":
    main()
