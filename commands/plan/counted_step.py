"""Bytes, operations and traffic of a training step, counted where torch dispatches its operations.

Under fake tensors, which have shapes and types but no values, the step runs in the memory of a laptop at any size.
Workspaces of kernels are not counted.
"""

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...callbacks import gather
from ...callbacks.speed import CountFlops
from ...common.private_api import DispatchMode
from ...lightning_modules.core.counting import gpu_attention, without_values

PRECISIONS = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
"""Type of matrix products, by Lightning's name of the precision. Trainings are counted in the first three."""
OPERATIONS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}


class Counted(NamedTuple):
    """A training step of one process, without parameters, gradients and batch.

    Attributes:
        activations: bytes of all tensors but logits at their peak.
        logits: bytes of the tables of similarities at their peak.
        peak: bytes of both together at their peak.
        flops: operations of forward and backward pass.
        sent: bytes of this process's input, by collective operation.
    """

    activations: int
    logits: int
    peak: int
    flops: int
    sent: Mapping[str, int]


class CountStep(CountFlops):
    """Count bytes, operations and traffic inside the context.

    Args:
        present: tensors that are not counted.
        rows: rows of the batch of this process; a table of logits has no more rows.
        columns: numbers of columns of the tables of logits.
    """

    def __init__(self, present: Iterable[Tensor], rows: int, columns: Collection[int]) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns
        self.live = {"logits": 0, "other": 0}
        self.peaks = {"logits": 0, "other": 0}
        self.peak = 0
        self.sent: Counter[str] = Counter()
        self._counted = WeakIdKeyDictionary()
        for tensor in present:
            self._counted[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._send(func.overloadpacket.__name__, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in _tensors_in(result):
            self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._counted:
            return
        self._counted[storage] = True
        is_table = tensor.dim() == 2 and tensor.shape[1] in self.columns and tensor.shape[0] <= self.rows
        kind = "logits" if is_table else "other"
        size = storage.nbytes()
        self._change(kind, size)
        weakref.finalize(storage, self._change, kind, -size)

    def _change(self, kind: str, size: int) -> None:
        self.live[kind] += size
        self.peaks[kind] = max(self.peaks[kind], self.live[kind])
        self.peak = max(self.peak, sum(self.live.values()))

    def _send(self, name: str, args: Any) -> None:
        # A gather and a reduce-scatter take output and input, the other operations a list of tensors.
        inputs = [args[1]] if isinstance(args[1], Tensor) else args[0]
        self.sent[OPERATIONS.get(name, name)] += sum(tensor.nbytes for tensor in inputs)


def _tensors_in(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's result: a tensor, or tensors and numbers in nested lists and tuples."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for entry in result:
            yield from _tensors_in(entry)


class Answers(DispatchMode):
    """Answer questions for values, which fake tensors and those on the meta device do not have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return int(not args[0].dim())  # counts [] may be divisors, and no flag [1] is set
        if name == "equal":
            return False
        return func(*args, **(kwargs or {}))


class _AsOnGPU(TorchFunctionMode):
    """Run attention as a GPU does, and in float32 what CUDA's autocast runs in float32 and the CPU's does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func in _FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = [_float32(argument) for argument in args]
        return func(*args, **(kwargs or {}))


_FLOAT32 = {
    *(F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax),
    *(Tensor.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, torch.exp, Tensor.exp, Tensor.pow, torch.pow),
}


def _float32(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as kernels of GPUs do, without a table of probabilities, also with a mask and with dropout."""
    half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    query, key, value = (tensor.to(half) for tensor in (query, key, value))
    mask = None if attn_mask is None else attn_mask.to(half)
    # With dropout, torch has no such kernel on a CPU.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )


@contextmanager
def fake_tensors(processes: int = 1) -> Iterator[None]:
    """Let torch compute shapes only, as the first of several processes."""
    with ExitStack() as stack:
        if processes > 1:
            dist.init_process_group("fake", rank=0, world_size=processes)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Answers())
        yield


def make_fake(module: nn.Module, kind: torch.dtype | None = None) -> None:
    """Replace parameters and buffers of a module by fake tensors, those in floating point by some of type `kind`."""
    replacements: dict[int, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            dtype = kind if kind is not None and tensor.is_floating_point() else tensor.dtype
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            trained = isinstance(tensor, nn.Parameter)
            replacements[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if trained else fake
        return replacements[id(tensor)]

    originals = [*module.parameters(), *module.buffers()]  # referred to, so that no identifier is used twice
    for layer in module.modules():
        for name, tensor in [
            *layer.named_parameters(recurse=False, remove_duplicate=False),
            *layer.named_buffers(recurse=False, remove_duplicate=False),
        ]:
            setattr(layer, name, replacement(tensor))
    del originals


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let attention and autocast be those of a GPU, not of a CPU."""
    with gpu_attention(), _AsOnGPU():
        yield


def count_step(
    module: Any,
    batch: dict[str, Tensor],
    processes: int = 1,
    precision: str = "32-true",
    cuda: bool = True,
) -> Counted:
    """Run forward and backward pass of a training step, and count them.

    Gradients exist before, as under DDP, whose buckets hold them.

    Args:
        module: the module, whose `training_step` runs without a Trainer.
        batch: the batch of one process, an image first.
        processes: number of processes.
        precision: a key of `PRECISIONS`.
        cuda: whether attention and autocast are those of a GPU, not of a CPU.
    """
    rows = len(next(iter(batch.values())))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    present = [*module.parameters(), *module.buffers(), *gradients, *batch.values()]
    queues = [queue.size for queue in module.queues().values()] if hasattr(module, "queues") else []
    all_rows = rows * processes
    columns = {all_rows} | {size + extra for size in queues for extra in (0, 1, all_rows)}
    half = PRECISIONS[precision]
    counting = CountStep(present, rows, columns)
    with without_values(), as_on_gpu() if cuda else nullcontext(), counting:
        with nullcontext() if half is None else torch.autocast("cpu", half):
            result: Any = module.training_step(batch, 0)
        named = result if isinstance(result, Mapping) else {"loss": result}
        loss = named["loss"]
        # With a tensor, `backward` would leave the mode of functions, in which slices must be recomputed.
        torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
        if not named.get("keys_are_gathered"):  # as `QueueCallback` gathers them
            for tensor in (*named.get("keys", {}).values(), *named.get("key_ids", {}).values()):
                gather(tensor)
    if counting.failed is not None:
        raise counting.failed
    return Counted(
        counting.peaks["other"], counting.peaks["logits"], counting.peak, counting.flops, dict(counting.sent)
    )


def optimizer_bytes(module: Any) -> int:
    """Return the bytes of the optimizer's state after a step, without its counters."""
    optimizer = (module._optimizer_factory or module.paper_optimizer)(module.parameter_groups())
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, Tensor) and value.dim())
