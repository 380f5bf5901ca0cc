"""How long the training stands still for a checkpoint, written at once and in the background.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --mib 2048 --folder /scratch

A checkpoint of that size (weights and two moments of an optimizer) is saved between steps, each a matrix product of
some milliseconds, in one thread. "stall" is the time that saving takes, "until complete" that until the file has its
name, "a step meanwhile" the median time of the steps until then, against "a step" without a save.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from timing import seconds

from vlightning.callbacks import AtomicCheckpointIO

TENSORS, SIDE = 60, 400


def measure(checkpoint: dict[str, dict[str, torch.Tensor]], path: Path, asynchronous: bool) -> dict[str, float]:
    """Return the seconds of a stall, of a step while the file is written, and until it is complete."""
    matrix = torch.randn(SIDE, SIDE)
    writer = AtomicCheckpointIO(asynchronous)
    start = time.perf_counter()
    writer.save_checkpoint(checkpoint, path)
    found = {"stall": time.perf_counter() - start}
    steps = []
    while not path.exists():
        steps.append(seconds(lambda: matrix @ matrix))
    found["until complete"] = time.perf_counter() - start
    writer.wait()
    found["a step meanwhile"] = statistics.median(steps) if steps else float("nan")
    found["a step"] = statistics.median(seconds(lambda: matrix @ matrix) for _ in range(50))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = args.mib * 2**20 // 4 // TENSORS
    checkpoint = {"state_dict": {str(number): torch.randn(size) for number in range(TENSORS)}}
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(args.repeats):
            for asynchronous, found in rows.items():
                path = Path(folder) / f"{number}-{asynchronous}.ckpt"
                found.append(measure(checkpoint, path, asynchronous))
                path.unlink()
    names = list(rows[True][0])
    print(f"{args.mib} MiB, milliseconds")
    print(f"| written | {' | '.join(names)} |")
    print("|---|" + "---|" * len(names))
    for asynchronous, found in rows.items():
        values = [1000 * statistics.median(each[name] for each in found) for name in names]
        print(f"| {'in the background' if asynchronous else 'at once'} |", " | ".join(f"{v:,.1f}" for v in values), "|")


if __name__ == "__main__":
    main()
