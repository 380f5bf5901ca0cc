"""Tensors across processes; in a single process every function here is the identity.

All functions use the default process group, whether Lightning, torchrun or a test started it.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...common.private_api import ignore_in_ddp


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the index of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(tensor: Tensor, gradient: bool = False) -> Tensor:
    """Concatenate the rows of all processes, those of rank 0 first.

    With `gradient`, the backward pass sums the gradients of the gathered rows over the processes, and every process
    takes the sum for its own rows. So if each process computes the *mean* loss of its own rows (against the gathered
    rows of all) and the gradients of the parameters are *averaged* over the processes, as DDP and FSDP do, then N
    processes with B rows give the loss and the gradients of one process with N*B rows, without any factor of N.

    Args:
        tensor: Rows of this process, [B, ...]. B is the same in every process; if it differs, use `gather_uneven`.
        gradient: Whether the gradient flows back to the processes of the rows. The same in every process, since the
            backward pass communicates.

    Returns:
        [N*B, ...] with N processes; in a single process the tensor itself. Detached unless `gradient`.

    Raises:
        ValueError: If the tensor has no row dimension.
    """
    if tensor.dim() == 0:
        raise ValueError("Expected rows [B, ...], got a tensor without dimensions: unsqueeze it first.")
    if not gradient:
        tensor = tensor.detach()
    if world_size() == 1:
        return tensor
    if gradient:
        gathered: Tensor = _GatherRows.apply(tensor)
        return gathered
    return _all_gather_rows(tensor)


def gather_uneven(tensor: Tensor) -> Tensor:
    """Concatenate the rows of all processes, whose numbers may differ or be zero, those of rank 0 first.

    For evaluation: without gradient, and the host waits for the row counts. With NCCL a CPU tensor is sent through the
    GPU and returned as a CPU tensor.

    Args:
        tensor: Rows of this process, [B_r, ...]; all other dimensions and the type are the same in every process.

    Returns:
        [sum of all B_r, ...], on the device of the argument.

    Raises:
        ValueError: If the tensor has no row dimension.
    """
    if tensor.dim() == 0:
        raise ValueError("Expected rows [B, ...], got a tensor without dimensions: unsqueeze it first.")
    tensor = tensor.detach()
    if world_size() == 1:
        return tensor
    device = _device_for_communication(tensor)
    rows = torch.tensor([tensor.shape[0]], device=device)
    counts = _all_gather_rows(rows).tolist()
    longest = max(counts)
    if longest == 0:
        return tensor
    padded = torch.zeros(longest, *tensor.shape[1:], dtype=tensor.dtype, device=device)
    padded[: tensor.shape[0]] = tensor
    blocks = _all_gather_rows(padded).split(longest)
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)]).to(tensor.device)


def gather_texts(texts: Sequence[str]) -> list[str]:
    """Concatenate the texts of all processes, whose numbers may differ or be zero, those of rank 0 first."""
    if world_size() == 1:
        return list(texts)
    encoded = [text.encode() for text in texts]
    lengths = gather_uneven(torch.tensor([len(text) for text in encoded], dtype=torch.long))
    content = bytes(gather_uneven(torch.tensor(list(b"".join(encoded)), dtype=torch.uint8)).tolist())
    ends = list(accumulate(lengths.tolist()))
    return [content[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return the sum over all processes, without gradient; the argument is unchanged.

    For counts that differ by rank: `loss_sum * world_size() / all_reduce_sum(count)` on every rank, with averaged
    gradients, is the mean over all rows of all ranks.
    """
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor) -> Tensor:
    """Return the elementwise maximum over all processes; the argument is unchanged."""
    return _all_reduce(tensor, dist.ReduceOp.MAX)


class HostCopy:
    """A number of a GPU that is copied to the host while both go on working; numbers of a CPU are there at once.

    Args:
        number: [1], any type.
    """

    def __init__(self, number: Tensor) -> None:
        self._number, self._arrived = number, None
        if number.device.type == "cuda":
            self._number = torch.empty(1, dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def value(self) -> int:
        """Wait for the work that was queued before the copy, not for later work, and return the number."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._number)


class LateMax:
    """The maximum over all processes of a number, exchanged in every step without waiting.

    If messages go through a GPU, the host would wait for all queued work. So `exchange` then returns the maximum of its
    last call, which has arrived by now: the answer is one call late, in all processes alike.
    """

    def __init__(self) -> None:
        self._asked: HostCopy | None = None

    def exchange(self, number: int) -> int:
        """Send a number, and return the maximum of this call, or of the last call (0 at the first)."""
        if world_size() == 1:
            return number
        device = _device_for_communication(torch.empty(0))
        largest = torch.full((1,), number, device=device)  # created on the device, without a copy from the host
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if device.type == "cpu":
            return int(largest)
        before = self._asked
        self._asked = HostCopy(largest)
        return 0 if before is None else before.value()


def broadcast(tensor: Tensor) -> None:
    """Overwrite a tensor of equal shape and type in every process with rank 0's."""
    if world_size() == 1:
        return
    content = tensor.detach().to(_device_for_communication(tensor))
    dist.broadcast(content, src=0)
    tensor.detach().copy_(content)


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors of equal shapes and types in every process with rank 0's, in one message for each type."""
    if world_size() == 1:
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in alike.values():
        content = torch.cat([tensor.detach().flatten() for tensor in group])
        dist.broadcast(content, src=0)
        for flat, tensor in zip(content.split([tensor.numel() for tensor in group]), group, strict=True):
            tensor.detach().copy_(flat.view_as(tensor))


def keep_from_ddp(module: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Exclude buffers from DDP's broadcast before every forward pass, since they are equal in all processes.

    Call this before DDP wraps the module: in `setup`, of a callback or of the module.

    Args:
        module: Module that DDP will wrap.
        parts: Submodules whose buffers are excluded.
    """
    kept = {id(buffer) for network in parts for buffer in network.buffers()}
    names = {name for name, buffer in module.named_buffers(remove_duplicate=False) if id(buffer) in kept}
    ignore_in_ddp(module, names)


class _GatherRows(torch.autograd.Function):
    """All-gather whose backward pass sums the gradients of this process's rows over the processes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = tensor.shape[0]
        return _all_gather_rows(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        rows = total.new_empty((ctx.rows, *total.shape[1:]))
        dist.reduce_scatter_tensor(rows, total)  # sends half as much as an all-reduce
        return rows


def _all_gather_rows(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:  # gloo does not support it
        return _all_gather_rows(tensor.to(torch.uint8)).to(torch.bool)
    gathered = tensor.new_empty((world_size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous())
    return gathered


def _all_reduce(tensor: Tensor, operation: Any) -> Tensor:
    tensor = tensor.detach()
    if world_size() == 1:
        return tensor.clone()
    result = tensor.to(_device_for_communication(tensor), copy=True)
    dist.all_reduce(result, operation)
    return result.to(tensor.device)


def _device_for_communication(tensor: Tensor) -> torch.device:
    """Return the tensor's device, or the GPU for a CPU tensor with NCCL, which only sends GPU tensors."""
    if tensor.device.type == "cpu" and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device


def is_first_to(action: str) -> bool:
    """Return whether this process is the first to request an action; True if the store of the run is unreachable."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        return True
    try:
        return int(group.get_group_store().add(f"vlightning: {action}", 1)) == 1
    except RuntimeError:  # the process that keeps the store has ended
        return True


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered from all ranks, a collective call; return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
