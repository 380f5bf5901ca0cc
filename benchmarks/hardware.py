"""Print the table of `docs/performance.md`: what `vlightning plan` computes for each method and GPU.

python benchmarks/hardware.py
"""

import logging

from vlightning import callbacks, lightning_modules
from vlightning.commands.plan.configuration import read, steps_of
from vlightning.commands.plan.estimate import estimate
from vlightning.commands.plan.module import start
from vlightning.common.gpus import GPUS

PROCESSES, PRECISION, MFU = 8, "bf16-mixed", 0.4
SHOWN = ("h100", "a100", "a100-40", "l40s", "v100")
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


def main() -> None:
    """Print a row for each recipe."""
    callbacks.load_all()
    lightning_modules.load_all()
    print("| recipe | pairs of a step | GiB of a process | " + " | ".join(SHOWN) + " | hours on 8 x h100 / a100 |")
    print("|---|---:|---:|" + "---:|" * (len(SHOWN) + 1))
    for name in RECIPES:
        print(row(name), flush=True)


def row(name: str) -> str:
    """Return the row of a recipe, with the largest batch of a process and the hours on each GPU."""
    planned = read([word if word.startswith("--") else f"--config=configs/{word}.yaml" for word in RECIPES[name]])
    batch = planned.data.get("global_batch_size") or (planned.data.get("batch_size") or 32) * PROCESSES
    logging.disable(logging.WARNING)
    start(planned.module)
    found = estimate(planned.module, planned.data, PROCESSES, PRECISION)
    gib = sum(found.memory(batch // PROCESSES, False).values()) / 2**30
    largest = [f"{found.largest_rows(GPUS[gpu].memory, False):,}" for gpu in SHOWN]
    batches = int(planned.trainer.get("accumulate_grad_batches") or 1)
    steps, operations = steps_of(planned, batch * batches), found.step["flops"](batch // PROCESSES) * batches
    seconds = None if steps is None else [steps * operations / (GPUS[gpu].half * MFU) for gpu in ("h100", "a100")]
    hours = " / ".join(f"{each / 3600:,.1f}" for each in seconds or ())
    return f"| {name} | {batch:,} | {gib:.1f} | {' | '.join(largest)} | {hours} |"


if __name__ == "__main__":
    main()
