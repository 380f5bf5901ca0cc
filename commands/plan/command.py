"""The command `vlightning plan`."""

import argparse
import logging
from typing import Any

from ... import lightning_modules
from ...common.errors import UserError
from ...common.gpus import GPU, GPUS
from ...common.names import did_you_mean
from ...lightning_modules.core.frozen import without_weights
from ..cli.command_parser import CommandParser
from .configuration import Planned, read, steps_of
from .counted_step import PRECISIONS
from .estimate import USABLE, Estimate, Layout, estimate, line, memory_lines
from .module import has_plan, start
from .reinforcement import is_reinforcement, plan_reinforcement
from .remedies import remedies

MIB = 2**20


def run_plan(words: list[str]) -> str:
    """Run `vlightning plan`, and return the plan.

    Raises:
        UserError: If an argument is wrong, or there is no plan for the module.
    """
    typed, others = parser_of_plan().parse_known_args(words)
    gpu = GPUS.get(typed.gpu.lower())
    if gpu is None:
        raise UserError(f"Expected the name of a GPU after --gpu, got {typed.gpu!r}: {did_you_mean(typed.gpu, GPUS)}")
    if not 0 < typed.mfu <= 1:
        raise UserError(f"Expected a share of the GPU's rate after --mfu, from 0 to 1, got {typed.mfu}: correct it.")
    options = [*(f"--config={config}" for config in typed.config), *others]
    planned = read(options)
    layout = _layout(typed, planned, gpu)
    logging.disable(logging.WARNING)  # fake tensors have no values to warn of
    try:
        with without_weights():
            return _plan(typed, options, planned, layout)
    finally:
        logging.disable(logging.NOTSET)


def _plan(typed: argparse.Namespace, options: list[str], planned: Planned, layout: Layout) -> str:
    """Return the text of a plan."""
    if is_reinforcement(planned.module):
        return plan_reinforcement(planned, layout, typed.steps)
    start(planned.module)
    counted = estimate(planned.module, planned.data, layout.processes, layout.precision)
    steps = typed.steps or steps_of(planned, layout.batch * layout.accumulated)
    paragraphs = [
        "Computed from the shapes of training steps, not measured on a GPU.",
        *(
            f"Without the teacher {name} of the checkpoint: give its run's config.yaml with --config to count it."
            for name in planned.absent
        ),
        layout.sentence(type(planned.module).__name__),
        "",
        _memory(counted, layout),
        _traffic(counted, layout.rows),
        _time(counted, layout, steps),
    ]
    if not counted.fits(layout.rows, layout.sharded, layout.gpu.memory):
        paragraphs += ["", remedies(options, planned, counted, layout, steps)]
    return "\n".join(paragraphs)


def parser_of_plan() -> CommandParser:
    """Return the parser of the arguments after `plan`."""
    parser = CommandParser(
        "plan",
        description="Compute memory, traffic and time of a `vlightning fit` with the same configs, or of the "
        "`vlightning predict` of a reinforcement, without data, weights or a GPU. Other options of `vlightning fit`, "
        "such as --model.memory.micro_batch_size 64, work too.",
    )
    parser.add_argument("--config", action="append", default=[], help="a config; may be repeated")
    parser.add_argument("--devices", type=int, help="number of GPUs of all nodes; by default the config's")
    parser.add_argument("--gpu", default="h100", help=f"one of {', '.join(GPUS)}; by default h100")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the GPU's peak rate that is reached; 0.4")
    parser.add_argument("--batch", type=int, help="rows of all GPUs together in a step; by default the config's")
    parser.add_argument("--precision", help=f"one of {', '.join(PRECISIONS)}; by default the config's")
    parser.add_argument("--steps", type=int, help="number of steps; by default the config's")
    return parser


def _layout(typed: argparse.Namespace, planned: Planned, gpu: GPU) -> Layout:
    """Return where and how the run is planned.

    Raises:
        UserError: If there is no plan for the module, the precision is none of a plan or of the GPU, or the
            processes do not divide the batch.
    """
    trainer = planned.trainer
    trains = not is_reinforcement(planned.module)
    if trains and not has_plan(type(planned.module)):
        classes = lightning_modules.method_classes()
        names = ", ".join(name for name, cls in classes.items() if has_plan(cls) or is_reinforcement(cls))
        raise UserError(
            f"Expected one of {names} to plan for, got {type(planned.module).__name__}: choose one of them."
        )
    precision = str(typed.precision or trainer.get("precision") or "32-true")
    precisions = [name for name in PRECISIONS if not (trains and name in ("bf16-true", "16-true"))]
    if precision not in precisions:
        raise UserError(
            f"Expected one of {', '.join(precisions)} as the precision of {type(planned.module).__name__} in a plan, "
            f"got {precision!r}: give one as --precision."
        )
    if gpu.rate(precision) is None:
        raise UserError(
            f"Expected a precision that {typed.gpu.lower()} has a rate for, got {precision!r}: give --precision "
            f"{precision.replace('bf16', '16')}."
        )
    devices: Any = trainer.get("devices")
    if isinstance(devices, list):
        devices = len(devices)
    elif not str(devices).isdigit():
        devices = 1
    processes = typed.devices or int(devices) * int(trainer.get("num_nodes") or 1)
    batch = typed.batch or planned.data.get("global_batch_size") or (planned.data.get("batch_size") or 32) * processes
    if processes < 1 or batch < 1 or batch % processes:
        raise UserError(
            f"Expected a batch that the processes divide, got {batch} rows and {processes} processes: change --batch "
            "or --devices."
        )
    strategy: Any = trainer.get("strategy")  # a name, or a class with arguments
    strategy_name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    return Layout(
        gpu=gpu,
        gpu_name=typed.gpu.lower(),
        processes=processes,
        batch=batch,
        accumulated=int(trainer.get("accumulate_grad_batches") or 1),
        precision=precision,
        mfu=typed.mfu,
        sharded=strategy_name.rpartition(".")[2] in ("ShardedStrategy", "ModelParallelStrategy"),
    )


def _memory(counted: Estimate, layout: Layout) -> str:
    columns = {name: counted.memory(layout.rows, sharded) for name, sharded in (("DDP", False), ("FSDP2", True))}
    largest = [counted.largest_rows(layout.gpu.memory, sharded) * counted.processes for sharded in (False, True)]
    lines = memory_lines(columns, layout.gpu.memory)
    lines.append(line(f"largest batch in {USABLE:.0%}", *(f"{rows:,}" for rows in largest)))
    if counted.most_rows is not None and counted.most_rows * counted.processes in largest:
        lines.append("A batch is at most as large as the queue.")
    return "\n".join(lines) + "\n"


def _traffic(counted: Estimate, rows: int) -> str:
    if counted.processes == 1:
        return "A single process sends nothing.\n"
    columns = [counted.traffic(rows, sharded) for sharded in (False, True)]
    lines = [line("MiB that a process sends", "DDP", "FSDP2")]
    for kind in dict.fromkeys([*columns[0], *columns[1]]):
        cells = [f"{column[kind] / MIB:,.2f}" if kind in column else "" for column in columns]
        lines.append(line(kind, *cells))
    return "\n".join(lines) + "\n"


def _time(counted: Estimate, layout: Layout, steps: int | None) -> str:
    operations = layout.operations(counted)
    seconds = operations / layout.speed
    sentence = (
        f"{operations / 1e12:,.3f} TFLOP of a process in a step, teachers and recomputation included: {seconds:.4g} s "
        f"at {layout.rate_sentence()}."
    )
    if steps is None:
        return f"{sentence}\nThe number of steps depends on the data: give --steps for hours."
    hours = steps * seconds / 3600
    return (
        f"{sentence}\n{steps:,} steps: {hours:,.2f} hours, {hours * counted.processes:,.2f} GPU hours, without waiting "
        "for data, communication, validation and checkpoints."
    )
