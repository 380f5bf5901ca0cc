"""Metrics and time of clip_benchmark on sets in DataComp's layout, by the Python of an environment with that package.

    path/to/python benchmarks/evaluate_clip_benchmark.py --model local-dir:folder sets/wds_cifar10_test sets/flickr

Prints one JSON object: of each folder the metrics, and wall and processor seconds, without the loading of the model. A
folder of Parquet files with columns `image` and `caption` is a retrieval set; others are classified. Imports nothing of
this repository.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import open_clip
import torch
from clip_benchmark.datasets.builder import build_dataset, image_captions_collate_fn
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval


def main() -> None:
    """Print the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    typed = parser.parse_args()
    torch.set_num_threads(typed.threads)
    network, _, transform = open_clip.create_model_and_transforms(typed.model)
    tokenizer = open_clip.get_tokenizer(typed.model)
    network.eval()
    found = {}
    for folder in typed.folders:
        began = time.perf_counter(), sum(os.times()[:4])
        if any(Path(folder).glob("*.parquet")):
            metrics = _retrieval(folder, network, transform, tokenizer, typed)
        else:
            metrics = _classification(folder, network, transform, tokenizer, typed)
        seconds = time.perf_counter() - began[0], sum(os.times()[:4]) - began[1]
        found[Path(folder).name] = {"metrics": metrics, "seconds": seconds}
    print(json.dumps(found))


def _classification(
    folder: str, network: Any, transform: Any, tokenizer: Any, typed: argparse.Namespace
) -> dict[str, float]:
    options = {"split": "test", "download": False, "task": "zeroshot_classification"}
    data = build_dataset("wds/set", root=folder, transform=transform, **options)
    loader = torch.utils.data.DataLoader(data.batched(typed.batch_size), batch_size=None, num_workers=typed.workers)
    return zeroshot_classification.evaluate(
        network, _WithClasses(loader, data.classes), tokenizer, data.classes, data.templates, "cpu", amp=False
    )


class _WithClasses:
    """A loader whose `dataset.classes` the package reads."""

    def __init__(self, loader: Any, classes: list[str]) -> None:
        self.loader, self.dataset, self.classes = loader, self, classes

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _retrieval(
    folder: str, network: Any, transform: Any, tokenizer: Any, typed: argparse.Namespace
) -> dict[str, float]:
    rows = datasets.load_dataset("parquet", data_files=str(Path(folder) / "*.parquet"), split="train")
    rows = rows.cast_column("image", datasets.Image())
    pairs = [(transform(row["image"]), row["caption"]) for row in rows]
    loader = torch.utils.data.DataLoader(pairs, typed.batch_size, collate_fn=image_captions_collate_fn)
    return zeroshot_retrieval.evaluate(network, loader, tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10])


if __name__ == "__main__":
    main()
