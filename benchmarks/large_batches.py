"""Memory and traffic of a process at 65,536 pairs on 8 to 256 GPUs, for each method: `docs/large_batches.md`.

    python benchmarks/large_batches.py              # the tables of the document, by the formulas of formulas.py
    python benchmarks/large_batches.py --measure    # measure the activations

Sizes of networks are read from modules that are built on the meta device. The activations of a pair (float32) are
measured in training steps of two and four pairs at full size on the CPU, which takes minutes; the results are stored in
`ACTIVATIONS`.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import open_clip
import torch
from formulas import Activations, Method, Run, batch_memory, describe, model_memory, sharded_traffic, traffic
from lightning import LightningModule
from memory import saved_bytes, storage_bytes
from torch import Tensor
from traffic import on_the_wire

from vlightning.lightning_modules import (
    ALBEFModule,
    CoCoRDModule,
    MMLGModule,
    MobileCLIPModule,
    SHReModule,
)
from vlightning.lightning_modules.albef import itc, itm, mlm
from vlightning.lightning_modules.albef import network as albef_network
from vlightning.lightning_modules.albef.settings import ContrastSettings
from vlightning.lightning_modules.losses import contrast as pair_losses
from vlightning.lightning_modules.mmlg import network as mmlg_network
from vlightning.lightning_modules.mmlg import teacher as mmlg_teacher
from vlightning.lightning_modules.networks.classifiers import build_classifier
from vlightning.lightning_modules.shre import module as shre_code
from vlightning.lightning_modules.shre import network as shre_network

PAIRS, PROCESSES = 65536, (8, 16, 32, 64, 128, 256)
MICRO, LOSS_ROWS = 64, 64
GIB, MIB = 2**30, 2**20
# Python modules that call `in_slices`.
SLICED = (albef_network, itc, itm, mlm, mmlg_teacher, mmlg_network, pair_losses, shre_code, shre_network)
# Measured by `--measure` with torch 2.15.
ACTIVATIONS = {
    "ALBEF": Activations(all=224786332, slice=136514992, between=3205648, batch=786920),
    "MobileCLIP": Activations(all=176722520, slice=176701784, between=6144, batch=806104),
    "MM-LG": Activations(all=83246616, slice=83234184, between=7168, batch=603352),
    "SHRe": Activations(all=70407676, slice=70267192, between=42720, batch=603144),
    "CoCoRD": Activations(all=22247388, slice=0, between=0, batch=1806352),
}


def albef(queue_size: int = 65536) -> LightningModule:
    """The paper's model and queues."""
    return ALBEFModule(contrast=ContrastSettings(queue_size=queue_size))


def mobileclip(queue_size: int = 0) -> LightningModule:
    """MobileCLIP-S0 on DataCompDR."""
    return MobileCLIPModule("MobileCLIP-S0")


def mmlg(queue_size: int = 0) -> LightningModule:
    """The paper's extraction with a ViT-B/16 as the teacher."""
    module = MMLGModule()
    module.teacher.network = open_clip.CLIP(**open_clip.get_model_config("ViT-B-16")).requires_grad_(False)
    module.teacher_scale = 100.0
    return module


def shre(queue_size: int = 0) -> LightningModule:
    """The thesis' model with a ResNet-50 as the teacher."""
    half = (0.5, 0.5, 0.5)
    module = SHReModule(teacher={"image_mean": half, "image_std": half})
    module.teacher.network = build_classifier("timm/resnet50", 1000).requires_grad_(False)
    return module


def cocord(queue_size: int = 65536) -> LightningModule:
    """The paper's ResNet-34 to ResNet-18 on ImageNet, with prediction in one direction."""
    return CoCoRDModule(
        "resnet18",
        1000,
        teacher={"name": "resnet34"},
        contrast={"queue_size": queue_size},
        prediction={"symmetric": False},
    )


METHODS: dict[str, Callable[..., Any]] = {
    "ALBEF": albef,
    "MobileCLIP": mobileclip,
    "MM-LG": mmlg,
    "SHRe": shre,
    "CoCoRD": cocord,
}


def sizes() -> dict[str, Method]:
    """Return the sizes of every method, without allocating weights."""
    with torch.device("meta"):
        return {name: describe(build()) for name, build in METHODS.items()}


def batch(name: str, pairs: int) -> dict[str, Tensor]:
    """Return random images and texts of a method's full size."""
    side, words, length = {
        "ALBEF": (256, 30522, 30),
        "MobileCLIP": (256, 49408, 77),
        "MM-LG": (224, 49408, 77),
        "SHRe": (224, 30522, 64),
        "CoCoRD": (224, 0, 0),
    }[name]
    found = {"image": torch.randn(pairs, 3, side, side), "image_id": torch.arange(pairs)}
    if name == "CoCoRD":
        views = {view: torch.randn(pairs, 3, side, side) for view in ("image_slow", "image_teacher")}
        return found | views | {"label": torch.arange(pairs)}
    found["input_ids"] = torch.randint(1000, words - 1, (pairs, length))
    if name == "MobileCLIP":
        found["synthetic_input_ids"] = torch.randint(1000, words - 1, (pairs, length))
        widths = {f"teacher_{what}": torch.randn(pairs, 1536) for what in ("image", "text", "synthetic")}
        return found | widths
    return found | {"attention_mask": torch.ones_like(found["input_ids"])}


def ready(module: Any) -> Any:
    """Return a module whose training step runs without a Trainer."""
    module.log = module.log_dict = lambda *_, **__: None
    module.current_alpha = lambda: 0.4
    return module


@contextmanager
def watched_slices(there: list[Tensor]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Run every sliced function on the whole batch; record the bytes that each saves, and its inputs and outputs."""
    kept: list[int] = []
    ends: list[Tensor] = []

    def whole(function: Callable[..., tuple[Tensor, ...]], size: Any, *inputs: Tensor, again: Any = None) -> Any:
        found: list[tuple[Tensor, ...]] = []
        kept.append(saved_bytes(lambda: found.append(function(*inputs)), without=[*there, *inputs]))
        ends.extend((*inputs, *found[0]))
        return found[0]

    patches = [patch.object(code, "in_slices", whole) for code in SLICED]
    for each in patches:
        each.start()
    try:
        yield kept, ends
    finally:
        for each in patches:
            each.stop()


@contextmanager
def in_micro_batches(module: Any) -> Iterator[None]:
    """Set the micro-batch size of a module to one pair."""
    memory = getattr(module, "memory", None)
    if memory is None:
        with patch.dict(module.hparams, {"micro_batch_size": 1}):
            yield
    else:
        with patch.object(module, "memory", replace(memory, micro_batch_size=1)):
            yield


def counted(module: Any, rows: dict[str, Tensor]) -> tuple[int, list[int], int]:
    """Return the bytes saved by a training step, by each sliced function, and as inputs and outputs of slices."""
    there = [*module.parameters(), *module.buffers(), *rows.values()]
    everything = saved_bytes(lambda: module.training_step(rows, 0), without=there)
    with watched_slices(there) as (kept, ends), in_micro_batches(module):
        module.training_step(rows, 0)
    return everything, kept, storage_bytes(ends, there)


def activations(module: Any, few: dict[str, Tensor], many: dict[str, Tensor]) -> Activations:
    """Return the bytes per pair, from the difference between a larger and a smaller batch."""
    pairs = len(many["image"]) - len(few["image"])
    (all_few, slices_few, between_few), (all_many, slices_many, between_many) = (
        counted(module, few),
        counted(module, many),
    )
    slices = [(more - less) // pairs for less, more in zip(slices_few, slices_many, strict=True)]
    rows = sum(tensor.nbytes for tensor in many.values()) - sum(tensor.nbytes for tensor in few.values())
    return Activations(
        (all_many - all_few) // pairs, max(slices, default=0), (between_many - between_few) // pairs, rows // pairs
    )


def gib(number: float) -> str:
    """Format bytes as GiB, with three decimals below 10."""
    return f"{number / GIB:.3f}" if number < 10 * GIB else f"{number / GIB:.1f}"


def mib(number: float) -> str:
    """Format bytes as MiB, with two decimals below 10."""
    return f"{number / MIB:.2f}" if number < 10 * MIB else f"{number / MIB:,.0f}"


def table(title: str, rows: dict[str, list[str]]) -> str:
    """Return a Markdown table with a column for each number of GPUs."""
    head = f"| {title} | " + " | ".join(f"{number} GPUs" for number in PROCESSES) + " |\n"
    line = "|---|" + "---:|" * len(PROCESSES) + "\n"
    return head + line + "".join(f"| {name} | " + " | ".join(cells) + " |\n" for name, cells in rows.items())


def memory_table(name: str, method: Method) -> str:
    """Return the memory of a process in GiB: without and with slices, unsharded and sharded."""
    rows: dict[str, list[str]] = {}
    for processes in PROCESSES:
        run, in_slices = Run(PAIRS, processes), Run(PAIRS, processes, MICRO, LOSS_ROWS)
        plain = model_memory(method, run)
        sharded = sum(model_memory(method, Run(PAIRS, processes, sharded=True)).values())
        whole, slices = (batch_memory(method, ACTIVATIONS[name], each) for each in (run, in_slices))
        ways = {"all at once": whole, "in slices": slices}
        cells: dict[str, float] = {**plain, "all of the above, sharded": sharded}
        for kind in dict.fromkeys((*whole, *slices)):
            if not ACTIVATIONS[name].slice or whole.get(kind) == slices.get(kind):
                cells[kind] = whole[kind]
            else:
                cells |= {f"{kind}, {how}": part[kind] for how, part in ways.items() if kind in part}
        cells["**all at once**"] = sum(plain.values()) + sum(whole.values())
        if ACTIVATIONS[name].slice:
            cells["**in slices**"] = sum(plain.values()) + sum(slices.values())
            cells["**in slices, sharded**"] = sharded + sum(slices.values())
        for kind, number in cells.items():
            rows.setdefault(kind, []).append(gib(number))
    return table("GiB of a process", {kind: cells for kind, cells in rows.items() if set(cells) != {gib(0)}})


def traffic_table(method: Method) -> str:
    """Return the traffic of a process in a step in MiB."""
    rows: dict[str, list[str]] = {}
    for processes in PROCESSES:
        run = Run(PAIRS, processes)
        sent = traffic(method, run)
        cells: dict[str, float] = {}
        for kind, exchange in sent.items():
            small = kind in ("buffers", "counts") or kind.startswith("flag")
            title = "buffers, counts, flags" if small else f"{kind}: {exchange.operation}"
            cells[title] = cells.get(title, 0.0) + on_the_wire(exchange.operation, exchange.bytes, processes)
        cells["**total**"] = sum(cells.values())
        for kind, exchange in sharded_traffic(method, run).items():
            title = f"sharded, at least: {kind}: {exchange.operation}"
            cells[title] = on_the_wire(exchange.operation, exchange.bytes, processes)
        for kind, number in cells.items():
            rows.setdefault(kind, []).append(mib(number))
    return table("MiB that a process sends", rows)


def tables() -> str:
    """Return all tables of the document."""
    parts = []
    for name, method in sizes().items():
        parts.append(f"### {name}\n\n{METHODS[name].__doc__}\n\n{memory_table(name, method)}\n{traffic_table(method)}")
    return "\n".join(parts)


def main() -> None:
    """Print the tables, or the measured activations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the activations")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    if not options.measure:
        print(tables(), end="")
        return
    for name in options.methods:
        torch.manual_seed(0)
        module = ready(METHODS[name](queue_size=8))
        print(f'    "{name}": {activations(module, batch(name, 2), batch(name, 4))},', flush=True)


if __name__ == "__main__":
    main()
