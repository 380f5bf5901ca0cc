"""Where and how a run is planned: GPU, processes, batch and precision."""

from dataclasses import dataclass

from ...common.gpus import GPU
from .estimate import Estimate


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


def line(name: str, *cells: str) -> str:
    """Return a line of a table: a name and right-aligned cells."""
    return (f"{name:<32}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()
