"""Peak memory and seconds of a retrieval evaluation of many texts, with drawn features, in one or several processes.

    python benchmarks/retrieval_memory.py --texts 1000000 --images 5000

Each process adds its share of the features in batches, as a validation does, and ranks those of all. The peak is the
resident set that Linux counts, with the libraries, and with the pages of files that the process has mapped and read,
which are shared by all processes of a machine and can be dropped; those apart are its own.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vlightning.lightning_modules.evaluation.retrieval import RetrievalEvaluation

TOKENS = 77
BATCH = 1000


def megabytes(name: str) -> float:
    """Return a value that Linux keeps of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(name))


def evaluate(process: int, typed: argparse.Namespace, store: str) -> None:
    """Evaluate the share of a process, and print its peaks."""
    torch.set_num_threads(1)
    if typed.processes > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=process, world_size=typed.processes)
    before = megabytes("VmRSS")
    evaluation = RetrievalEvaluation()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(typed.images, typed.width, generator=generator)
    numbers = torch.arange(typed.images)[process :: typed.processes]
    evaluation.add_images(images[numbers], numbers, numbers)
    began = time.perf_counter()
    for start in range(process * BATCH, typed.texts, typed.processes * BATCH):
        texts = torch.arange(start, min(start + BATCH, typed.texts))
        noise = torch.randn(len(texts), typed.width, generator=torch.Generator().manual_seed(start))
        features = images[texts % typed.images] + typed.noise * noise
        ids = torch.ones(len(texts), TOKENS, dtype=torch.long)
        evaluation.add_texts(features, ids, ids, texts % typed.images, texts)
    added = megabytes("VmHWM")
    recalls = evaluation.compute().recalls
    print(
        f"process {process} of {typed.processes}: {typed.texts:,} texts, {typed.images:,} images of {typed.width} "
        f"numbers: peak {megabytes('VmHWM'):.0f} MB ({before:.0f} before, {added:.0f} when all were added; now "
        f"{megabytes('RssAnon'):.0f} its own), {time.perf_counter() - began:.0f} s; recall_mean "
        f"{recalls['recall_mean']!r}",
        flush=True,
    )


def main() -> None:
    """Run the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--noise", type=float, default=5.0, help="deviation of a text's features from its image's")
    parser.add_argument("--processes", type=int, default=1)
    typed = parser.parse_args()
    store = Path(f"/tmp/retrieval-{time.time_ns()}")
    if typed.processes == 1:
        evaluate(0, typed, str(store))
    else:
        mp.spawn(evaluate, (typed, str(store)), typed.processes)
    store.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
