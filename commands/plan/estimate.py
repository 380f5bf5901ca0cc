"""Memory, traffic and operations of a process for any batch, from steps of three small batches; and where it runs.

n rows in all processes together, N processes, b = n / N rows in each. Tensors of a step grow with b, and tables of
logits with b n = N b^2, so quadratic functions of b through three points are exact once activations exceed temporary
tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.gpus import GPU
from .counted_step import Counted, count_step, fake_tensors, make_fake, optimizer_bytes

GIB = 2**30
ROWS = 64
"""Least rows of the smallest batch, whose activations exceed temporary tensors, as the gradient of an embedding."""
USABLE = 0.9
"""Share of a GPU's memory that is planned with; the rest is for CUDA, the workspaces of kernels, and fragmentation."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a process that do not depend on the batch, unsharded; buffers include queues."""

    parameters: int
    optimizer: int
    averages: int
    frozen: int
    buffers: int


@dataclass(frozen=True)
class Estimate:
    """Memory, traffic and operations of a process.

    Attributes:
        processes: number of processes N.
        sizes: bytes that do not depend on the batch.
        step: bytes and operations of a step by number of rows b, with the batch as `batch`.
        sent: bytes of this process's input by collective operation and number of rows.
        most_rows: largest b that the queues allow; None without queues.
    """

    processes: int
    sizes: Sizes
    step: Mapping[str, Callable[[int], float]]
    sent: Mapping[str, Callable[[int], float]]
    most_rows: int | None

    def memory(self, rows: int, sharded: bool) -> dict[str, float]:
        """Return the bytes of a process by kind; the peaks of activations and logits are added up."""
        sizes = self.sizes
        share = self.processes if sharded else 1
        return {
            "parameters": sizes.parameters / share,
            "gradients": sizes.parameters / share,
            "optimizer": sizes.optimizer / share,
            "moving averages": sizes.averages / share,
            "frozen networks": sizes.frozen / share,
            "queues, buffers": sizes.buffers,
            "images and tokens": self.step["batch"](rows),
            "activations": self.step["activations"](rows),
            "logits": self.step["logits"](rows),
        }

    def traffic(self, rows: int, sharded: bool) -> dict[str, float]:
        """Return the bytes that a process sends in a step, by kind, with ring algorithms.

        The formulas are those of `docs/large_batches.md`; sharded parameters are a lower bound.
        """
        others = self.processes - 1
        shares = {"all-gather": others, "reduce-scatter": others / self.processes}
        sent = {
            f"of the step: {operation}": size(rows) * shares.get(operation, 2 * others / self.processes)
            for operation, size in self.sent.items()
        }
        share = others / self.processes
        trained = self.sizes.parameters
        if not sharded:
            return sent | {"gradients: all-reduce": 2 * trained * share}
        gathered = trained + self.sizes.averages + self.sizes.frozen
        return sent | {"parameters: all-gather": gathered * share, "gradients: reduce-scatter": trained * share}

    def fits(self, rows: int, sharded: bool, memory: float) -> bool:
        """Return whether a process fits into the memory of a GPU in bytes."""
        return fits(self.memory(rows, sharded), memory)

    def largest_rows(self, memory: float, sharded: bool) -> int:
        """Return the largest number of rows of a process that fits into a GPU's memory; 0 if none does."""
        low = 0
        high = 1
        while self.fits(high, sharded, memory) and high < 2**24:
            low = high
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(middle, sharded, memory):
                low = middle
            else:
                high = middle
        return low if self.most_rows is None else min(low, self.most_rows)


@dataclass(frozen=True)
class Layout:
    """Where and how a run is planned.

    Attributes:
        gpu: the GPU of each process.
        gpu_name: its name.
        processes: number of processes.
        batch: rows of all processes in a batch.
        accumulated: batches of an optimizer step.
        precision: a key of `counted_step.PRECISIONS`, for which the GPU has a rate.
        mfu: share of the GPU's rate that is reached.
        sharded: whether the run shards its parameters (FSDP2).
    """

    gpu: GPU
    gpu_name: str
    processes: int
    batch: int
    accumulated: int
    precision: str
    mfu: float
    sharded: bool

    @property
    def rows(self) -> int:
        """Rows of a process in a batch."""
        return self.batch // self.processes

    @property
    def rate(self) -> float:
        """Operations per second of the data sheet."""
        rate = self.gpu.rate(self.precision)
        assert rate is not None  # checked where the layout is made
        return rate

    @property
    def speed(self) -> float:
        """Operations per second that are reached."""
        return self.rate * self.mfu

    def operations(self, counted: Estimate) -> float:
        """Return the operations of a process in an optimizer step."""
        return counted.step["flops"](self.rows) * self.accumulated

    def sentence(self, name: str) -> str:
        """Return what is planned as a sentence; `name` is that of the module."""
        return (
            f"{name}: {self.batch:,} rows a step on {self.processes} x {self.gpu_name}, {self.rows:,} each, "
            f"{self.precision}."
        )

    def rate_sentence(self) -> str:
        """Return the rate that is reached, such as "40% of 989 TFLOP/s"."""
        return f"{self.mfu:.0%} of {self.rate / 1e12:g} TFLOP/s"


def fits(kinds: Mapping[str, float], memory: float) -> bool:
    """Return whether the bytes of a process by kind are at most `USABLE` of a GPU's memory."""
    return sum(kinds.values()) <= USABLE * memory


def memory_lines(columns: Mapping[str, Mapping[str, float]], memory: float) -> list[str]:
    """Return the lines of a table of the bytes of a process by kind, a column for each way to run it."""
    lines = [line("GiB of a process", *columns)]
    for kind in next(iter(columns.values())):
        lines.append(line(kind, *(f"{column[kind] / GIB:.3f}" for column in columns.values())))
    sums = [sum(column.values()) for column in columns.values()]
    lines.append(line("sum of the peaks", *(f"{size / GIB:.3f}" for size in sums)))
    return [*lines, line("of the GPU's memory", *(f"{size / memory:.0%}" for size in sums))]


def line(name: str, *cells: str) -> str:
    """Return a line of a table: a name and right-aligned cells."""
    return (f"{name:<32}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()


def quadratic(rows: Sequence[int], values: Sequence[float]) -> Callable[[int], float]:
    """Return the quadratic function that has three values at three equally distant numbers of rows."""
    first, second, third = values
    bend = (third - 2 * second + first) / 2
    slope = second - first - bend

    def value(at: int) -> float:
        x = (at - rows[0]) / (rows[1] - rows[0])
        return max(bend * x * x + slope * x + first, 0.0)

    return value


def sizes_of(module: Any) -> Sizes:
    """Return the sizes of a module on fake tensors."""
    pairs = module.momentum_pairs() if hasattr(module, "momentum_pairs") else {}
    averaged = {id(each) for pair in pairs.values() for each in module.get_submodule(pair.target).parameters()}
    trained = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    averages = sum(each.nbytes for each in module.parameters() if id(each) in averaged)
    return Sizes(
        parameters=trained,
        optimizer=optimizer_bytes(module),
        averages=averages,
        frozen=sum(each.nbytes for each in module.parameters()) - trained - averages,
        buffers=sum(each.nbytes for each in module.buffers()),
    )


def estimate(module: Any, data: Mapping[str, Any], processes: int = 1, precision: str = "32-true") -> Estimate:
    """Count steps of three batches of a module from `start`, whose parameters become fake tensors."""
    memory = getattr(module, "memory", None)
    slices = [getattr(memory, name, None) or 0 for name in ("micro_batch_size", "loss_rows")]
    queues = module.queues() if hasattr(module, "queues") else {}
    most_rows = min((queue.size for queue in queues.values()), default=0) // processes or None
    step = math.ceil(ROWS / max(*slices, 1)) * max(*slices, 1)
    step = step if most_rows is None else max(min(step, most_rows // 3), 2)
    # From the second slice on, gradients are added to those of the first.
    first = 2 if any(slices) and (most_rows is None or 4 * step <= most_rows) else 1
    batch_sizes = [number * step for number in range(first, first + 3)]
    steps: list[Counted] = []
    batches: list[int] = []
    with fake_tensors(processes):
        make_fake(module)
        for rows in batch_sizes:
            batch = module.example_batch(rows, data)
            batches.append(sum(tensor.nbytes for tensor in batch.values()))
            steps.append(count_step(module, batch, processes, precision))
        sizes = sizes_of(module)
    by_rows = {kind: [getattr(each, kind) for each in steps] for kind in ("activations", "logits", "flops")}
    sent = {kind: quadratic(batch_sizes, [each.sent[kind] for each in steps]) for kind in steps[0].sent}
    functions = {kind: quadratic(batch_sizes, values) for kind, values in (by_rows | {"batch": batches}).items()}
    return Estimate(processes, sizes, functions, sent, most_rows)
