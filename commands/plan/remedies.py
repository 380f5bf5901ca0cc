"""Settings that make a run fit into the memory of its GPUs, each with its memory and hours."""

from typing import Any

from torch import nn

from .configuration import Planned, read
from .estimate import USABLE, Estimate, Layout, estimate
from .module import start

LEAST_SLICE = 8
"""Least `micro_batch_size` that is tried: smaller slices keep a GPU idle."""
_SHARDED = "--config configs/strategy/fsdp.yaml"


def remedies(options: list[str], planned: Planned, counted: Estimate, layout: Layout, steps: int | None) -> str:
    """Return the settings with which a run fits that does not fit as it is, or that none was found."""
    tried: list[tuple[str, Estimate, bool]] = []
    if not layout.sharded and layout.processes > 1:
        tried.append((_SHARDED, counted, True))
    tried += [(words, other, layout.sharded) for words, other in _recounted(options, planned, counted, layout)]
    fitting = [
        (words, other, sharded)
        for words, other, sharded in tried
        if other.fits(layout.rows, sharded, layout.gpu.memory)
    ]
    if not fitting and not layout.sharded and layout.processes > 1:  # one alone does not: with sharding too
        fitting = [
            (f"{_SHARDED} {words}", other, True)
            for words, other, sharded in tried
            if not sharded and other.fits(layout.rows, True, layout.gpu.memory)
        ]
    if not fitting:
        largest = counted.largest_rows(layout.gpu.memory, layout.sharded) * layout.processes
        return (
            f"It does not fit in {USABLE:.0%} of {layout.gpu_name}, and no setting was found with which it does: give "
            f"more --devices, another --gpu, or a --batch of at most {largest:,}, which contrasts fewer pairs."
        )
    lines = [f"It does not fit in {USABLE:.0%} of {layout.gpu_name}. It does with one of:"]
    lines += [f"  {words}: {_price(other, layout, sharded, steps)}" for words, other, sharded in fitting]
    if any("micro_batch_size" in words for words, *_ in fitting) and _has_batch_norm(planned.module):
        lines.append("BatchNorm then normalizes each slice by the statistics of its own rows.")
    return "\n".join(lines)


def _recounted(options: list[str], planned: Planned, counted: Estimate, layout: Layout) -> list[tuple[str, Estimate]]:
    """Return the settings of `model.memory` that save activations, with the run counted with each."""
    memory: Any = getattr(planned.module, "memory", None)
    tried = []
    if getattr(memory, "activation_checkpointing", None) is False:
        words = "--model.memory.activation_checkpointing true"
        tried.append((words, _count(options, words, layout)))
    if hasattr(memory, "micro_batch_size"):
        size = _first_slice(memory.micro_batch_size or layout.rows, counted, layout)
        while size >= LEAST_SLICE:
            words = f"--model.memory.micro_batch_size {size}"
            tried.append((words, other := _count(options, words, layout)))
            if other.fits(layout.rows, layout.sharded, layout.gpu.memory):
                break
            size //= 2
    return tried


def _first_slice(rows: int, counted: Estimate, layout: Layout) -> int:
    """Return rows / 2, or its half, and so on: the first slice that fits if activations are proportional to it."""
    kinds = counted.memory(layout.rows, layout.sharded)
    room = USABLE * layout.gpu.memory - sum(size for kind, size in kinds.items() if kind != "activations")
    size = rows // 2
    while size // 2 >= LEAST_SLICE and kinds["activations"] * size / rows > room:
        size //= 2
    return size


def _count(options: list[str], words: str, layout: Layout) -> Estimate:
    planned = read([*options, *words.split()])
    start(planned.module)
    return estimate(planned.module, planned.data, layout.processes, layout.precision)


def _price(counted: Estimate, layout: Layout, sharded: bool, steps: int | None) -> str:
    """Return memory, and hours or seconds of a step."""
    size = sum(counted.memory(layout.rows, sharded).values())
    seconds = layout.operations(counted) / layout.speed
    time = f"{seconds:.4g} s a step" if steps is None else f"{steps * seconds / 3600:,.2f} hours"
    return f"{size / 2**30:.1f} GiB ({size / layout.gpu.memory:.0%}), {time}"


def _has_batch_norm(module: nn.Module) -> bool:
    """Return whether a trained network of a module has BatchNorm."""
    norms = (
        layer for layer in module.modules() if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm)
    )
    return any(parameter.requires_grad for norm in norms for parameter in norm.parameters())
