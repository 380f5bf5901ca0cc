"""The command `vlightning plan`."""

import argparse
import logging
from typing import Any

from ..common.errors import UserError
from ..common.gpus import GPU, GPUS
from ..common.names import did_you_mean
from .configuration import Planned, read, steps_of
from .counted_step import PRECISIONS
from .estimate import USABLE, Estimate, estimate
from .module import start

GIB, MIB = 2**30, 2**20


def run_plan(words: list[str]) -> str:
    """Run `vlightning plan`.

    Args:
        words: The arguments after `plan`.

    Returns:
        The plan.

    Raises:
        UserError: If an argument is wrong, or there is no plan for the module.
    """
    typed, others = parser_of_plan().parse_known_args(words)
    gpu = _gpu_of(typed.gpu)
    if not 0 < typed.mfu <= 1:
        raise UserError(f"Expected a share of the GPU's rate after --mfu, from 0 to 1, got {typed.mfu}: correct it.")
    planned = read([*(f"--config={config}" for config in typed.config), *others])
    trainer = planned.trainer
    processes = typed.devices or _devices(trainer) * int(trainer.get("num_nodes") or 1)
    precision = str(typed.precision or trainer.get("precision") or "32-true")
    if precision not in PRECISIONS:
        raise UserError(f"Expected a precision to plan for, got {precision!r}: {did_you_mean(precision, PRECISIONS)}")
    batch = typed.batch or planned.data.get("global_batch_size") or (planned.data.get("batch_size") or 32) * processes
    if processes < 1 or batch < 1 or batch % processes:
        raise UserError(
            f"Expected a batch that the processes divide, got {batch} rows and {processes} processes: change --batch "
            "or --devices."
        )
    logging.disable(logging.WARNING)  # about values, which there are none of
    try:
        start(planned.module)
        found = estimate(planned.module, planned.data, processes, precision)
    finally:
        logging.disable(logging.NOTSET)
    name = type(planned.module).__name__
    parts = [
        "Computed from the shapes of training steps, not measured on a GPU.",
        f"{name}: {batch:,} rows a step on {processes} x {typed.gpu.lower()}, {batch // processes:,} each, "
        f"{precision}.",
        "",
        _memory(found, gpu, batch // processes),
        _traffic(found, batch // processes),
        _time(found, planned, gpu, batch, typed.mfu, typed.steps, precision),
    ]
    return "\n".join(parts)


def parser_of_plan() -> argparse.ArgumentParser:
    """Return the parser of the arguments after `plan`."""
    parser = argparse.ArgumentParser(
        "vlightning plan",
        description="Compute memory, traffic and time of a `vlightning fit` with the same configs, without data, "
        "weights or a GPU. Other options of `vlightning fit`, such as --model.memory.micro_batch_size 64, work too.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], help="a config; may be repeated")
    parser.add_argument("--devices", type=int, help="number of GPUs of all nodes; by default the config's")
    parser.add_argument("--gpu", default="h100", help=f"one of {', '.join(GPUS)}; by default h100")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the GPU's peak rate that is reached; 0.4")
    parser.add_argument("--batch", type=int, help="rows of all GPUs together in a step; by default the config's")
    parser.add_argument("--precision", help=f"one of {', '.join(PRECISIONS)}; by default the config's")
    parser.add_argument("--steps", type=int, help="number of steps; by default the config's")
    return parser


def _gpu_of(name: str) -> GPU:
    found = GPUS.get(name.lower())
    if found is None:
        raise UserError(f"Expected the name of a GPU after --gpu, got {name!r}: {did_you_mean(name, GPUS)}")
    return found


def _devices(trainer: dict[str, Any]) -> int:
    given: Any = trainer.get("devices")
    if isinstance(given, list):
        return len(given)
    return int(given) if str(given).isdigit() else 1


def _memory(found: Estimate, gpu: GPU, rows: int) -> str:
    columns = [found.memory(rows, sharded) for sharded in (False, True)]
    lines = [_line("GiB of a process", "DDP", "FSDP2")]
    lines += [_line(kind, *(f"{column[kind] / GIB:.3f}" for column in columns)) for kind in columns[0]]
    sums = [sum(column.values()) for column in columns]
    lines.append(_line("sum of the peaks", *(f"{size / GIB:.3f}" for size in sums)))
    lines.append(_line("of the GPU's memory", *(f"{size / gpu.memory:.0%}" for size in sums)))
    largest = [found.largest_rows(gpu.memory, sharded) * found.processes for sharded in (False, True)]
    lines.append(_line(f"largest batch in {USABLE:.0%}", *(f"{rows:,}" for rows in largest)))
    if found.most_rows is not None and found.most_rows * found.processes in largest:
        lines.append("A batch is at most as large as the queue.")
    return "\n".join(lines) + "\n"


def _traffic(found: Estimate, rows: int) -> str:
    if found.processes == 1:
        return "A single process sends nothing.\n"
    columns = [found.traffic(rows, sharded) for sharded in (False, True)]
    lines = [_line("MiB that a process sends", "DDP", "FSDP2")]
    for kind in dict.fromkeys([*columns[0], *columns[1]]):
        cells = [f"{column[kind] / MIB:,.2f}" if kind in column else "" for column in columns]
        lines.append(_line(kind, *cells))
    return "\n".join(lines) + "\n"


def _line(name: str, *cells: str) -> str:
    return f"{name:<32}" + "".join(f"{cell:>12}" for cell in cells)


def _time(
    found: Estimate, planned: Planned, gpu: GPU, batch: int, mfu: float, steps: int | None, precision: str
) -> str:
    batches = int(planned.trainer.get("accumulate_grad_batches") or 1)
    rate = gpu.rate(precision)
    assert rate is not None  # for each of PRECISIONS
    operations = found.step["flops"](batch // found.processes) * batches
    seconds = operations / (rate * mfu)
    lines = [
        f"{operations / 1e12:,.3f} TFLOP of a process in a step, teachers and recomputation included: {seconds:.4g} s "
        f"at {mfu:.0%} of {rate / 1e12:g} TFLOP/s."
    ]
    steps = steps or steps_of(planned, batch * batches)
    if steps is None:
        return lines[0] + "\nThe number of steps depends on the data: give --steps for hours."
    hours = steps * seconds / 3600
    lines.append(
        f"{steps:,} steps: {hours:,.2f} hours, {hours * found.processes:,.2f} GPU hours, without waiting for data, "
        "communication, validation and checkpoints."
    )
    return "\n".join(lines)
