"""Print two tables of `docs/performance.md`, computed by `vlightning plan`: GPUs for each method, and traffic.

python benchmarks/hardware.py
"""

import logging
from typing import NamedTuple

from vlightning import callbacks, lightning_modules
from vlightning.commands.plan.configuration import Planned, read, steps_of
from vlightning.commands.plan.estimate import Estimate, estimate
from vlightning.commands.plan.module import start
from vlightning.common.gpus import GPUS

PROCESSES, PRECISION, MFU = 8, "bf16-mixed", 0.4
SHOWN = ("h100", "a100", "a100-40", "l40s", "v100")
CLUSTERS = (8, 32, 256)
LINK = 8 * 50e9
"""Bytes a second to the next process of a ring, at most: rings of a node share its eight links of 400 Gbit/s to other
nodes, as in NVIDIA's DGX H100, whose NVLink within a node has 450 GB/s a direction."""
RECIPES = {
    "ALBEF, 4M images": ("albef/base", "albef/pretrain_4m"),
    "ALBEF, retrieval on COCO": ("albef/retrieval_flickr30k", "albef/retrieval_coco"),
    "CLIP ViT-B/32, fine-tuning": ("clip/finetune", "--model.model=ViT-B-32"),
    "CLIP ViT-B/32, adapters": ("clip/finetune", "clip/lora", "--model.model=ViT-B-32"),
    "CoCoRD, resnet34 to resnet18": ("cocord/imagenet", "cocord/pairs/imagenet_resnet34_resnet18"),
    "MM-LG, extraction": ("mmlg/extract",),
    "MobileCLIP-S0, 12M": ("mobileclip/base",),
    "SHRe": ("shre/distill",),
}


class Counted(NamedTuple):
    """A recipe whose step was counted on one of some processes."""

    planned: Planned
    rows: int  # pairs of a process
    estimate: Estimate


def main() -> None:
    """Print both tables, a row for each recipe."""
    callbacks.load_all()
    lightning_modules.load_all()
    print("| recipe | pairs of a step | GiB of a process | " + " | ".join(SHOWN) + " | hours on 8 x h100 / a100 |")
    print("|---|---:|---:|" + "---:|" * (len(SHOWN) + 1))
    for name in RECIPES:
        print(row(name), flush=True)
    sent, shares = (" | ".join(f"{kind}, {size} GPUs" for size in CLUSTERS) for kind in ("MiB", "share"))
    print(f"\n| recipe | pairs of a process | {sent} | {shares} |")
    print("|---|---:|" + "---:|" * (2 * len(CLUSTERS)))
    for name in RECIPES:
        print(traffic_row(name), flush=True)


def counted(name: str, processes: int) -> Counted:
    """Return a recipe on some processes, each with the pairs that it has on `PROCESSES`."""
    planned = read([word if word.startswith("--") else f"--config=configs/{word}.yaml" for word in RECIPES[name]])
    batch = planned.data.get("global_batch_size") or (planned.data.get("batch_size") or 32) * PROCESSES
    logging.disable(logging.WARNING)
    start(planned.module)
    return Counted(planned, batch // PROCESSES, estimate(planned.module, planned.data, processes, PRECISION))


def row(name: str) -> str:
    """Return the row of a recipe, with the largest batch of a process and the hours on each GPU."""
    planned, rows, estimated = counted(name, PROCESSES)
    batch = rows * PROCESSES
    gib = sum(estimated.memory(rows, False).values()) / 2**30
    largest = [f"{estimated.largest_rows(GPUS[gpu].memory, False):,}" for gpu in SHOWN]
    batches = int(planned.trainer.get("accumulate_grad_batches") or 1)
    steps, operations = steps_of(planned, batch * batches), estimated.step["flops"](rows) * batches
    seconds = None if steps is None else [steps * operations / (GPUS[gpu].half * MFU) for gpu in ("h100", "a100")]
    hours = " / ".join(f"{each / 3600:,.1f}" for each in seconds or ())
    return f"| {name} | {batch:,} | {gib:.1f} | {' | '.join(largest)} | {hours} |"


def traffic_row(name: str) -> str:
    """Return what a process of a recipe sends in a step under DDP, and the share of its time if nothing overlaps."""
    sizes, shares = [], []
    for processes in CLUSTERS:
        _, rows, estimated = counted(name, processes)
        sent = sum(estimated.traffic(rows, False).values())
        computing, sending = estimated.step["flops"](rows) / (GPUS["h100"].half * MFU), sent / LINK
        sizes.append(f"{sent / 2**20:,.0f}")
        shares.append(f"{sending / (computing + sending):.1%}")
    return f"| {name} | {rows:,} | {' | '.join(sizes)} | {' | '.join(shares)} |"


if __name__ == "__main__":
    main()
