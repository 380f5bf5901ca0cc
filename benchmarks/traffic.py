"""Count the traffic between processes in a training step, by kind, where torch calls the communication backend.

The counter sees all senders: the functions of this package, DDP's reducer, FSDP2 and Lightning.
"""

import sys
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = {
    "_allgather_base_": "all-gather",
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "_reduce_scatter_base_": "reduce-scatter",
}
# Kind by sending function; the innermost of these functions on the stack decides.
SENDERS = {
    "_GatherRows.forward": "features",
    "_GatherRows.backward": "gradients of features",
    "gather": "keys",  # teachers' features, and keys of a queue
    "mean_count": "counts",
    "SkipNonFiniteSteps._ask": "flag: finite",
    "StopOnSignal._stop_if_asked": "flag: signal",
    "_TrainingEpochLoop._broadcast_sigterm_tensor": "flag: Lightning's",
    "DistributedDataParallel._sync_buffers": "buffers",
    "Tensor.backward": "gradients",
}
OTHER = "other"


class Sent(NamedTuple):
    """A collective operation of this process."""

    kind: str
    operation: str
    bytes: int  # of this process's input: its part of a gather, or the whole tensor of a reduction or broadcast
    shape: tuple[int, ...]
    gathered: int  # bytes of a gather's output, 0 for other operations


class Total(NamedTuple):
    """All operations of one kind in a step."""

    operation: str
    calls: int
    bytes: int


def on_the_wire(operation: str, size: float, processes: int) -> float:
    """Return the bytes that a process sends with ring algorithms, averaged over the processes.

    Args:
        operation: a value of `OPERATIONS`.
        size: bytes as in `Sent`; of a reduce-scatter those of the whole input.
        processes: number of processes N.
    """
    others = processes - 1
    shares = {
        "all-gather": float(others),
        "reduce-scatter": others / processes,
        "all-reduce": 2 * others / processes,
        "broadcast": others / processes,
    }
    return shares[operation] * size


class CountTraffic(TorchDispatchMode):
    """Record every operation of the process group that is started inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a function of the process group, and call it."""
        if function.namespace == "c10d":
            name = function._schema.name.partition("::")[2]
            # Gather and reduce-scatter take output and input, in this order; the other operations a list of tensors.
            brought = args[1] if isinstance(args[1], Tensor) else args[0]
            operation = OPERATIONS.get(name, name)
            gathered = args[0].nbytes if operation == "all-gather" else 0
            for tensor in [brought] if isinstance(brought, Tensor) else brought:
                self.sent.append(Sent(_kind(tensor), operation, tensor.nbytes, tuple(tensor.shape), gathered))
        return function(*args, **(kwargs or {}))


class TrafficOfSteps(Callback):
    """Count the traffic of each training step, from the start of its batch to the start of the next."""

    def __init__(self) -> None:
        self.steps: list[list[Sent]] = []
        self._counting: CountTraffic | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to count the next step."""
        self._end(None, None, None)
        self._counting = CountTraffic()
        self._counting.__enter__()
        self.steps.append(self._counting.sent)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the count of the last step."""
        self._end(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the count."""
        self._end(None, None, None)

    def _end(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._counting is not None:
            self._counting.__exit__(*exception)
            self._counting = None


def totals(sent: list[Sent]) -> dict[str, Total]:
    """Return the totals by kind."""
    found: dict[str, Total] = {}
    for each in sent:
        before = found.get(each.kind, Total(each.operation, 0, 0))
        assert before.operation == each.operation
        found[each.kind] = Total(each.operation, before.calls + 1, before.bytes + each.bytes)
    return found


def _kind(tensor: Tensor) -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = SENDERS.get(frame.f_code.co_qualname)
        if kind is not None:
            return "ids" if kind == "keys" and not tensor.is_floating_point() else kind
        frame = frame.f_back
    return OTHER
