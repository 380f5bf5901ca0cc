"""Tensors across processes: every function here is the identity where there is only one process.

They talk to the default process group, whoever started it (Lightning, torchrun, a test).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def world_size() -> int:
    """Returns the number of processes, 1 where there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns the index of this process among all, 0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(tensor: Tensor, gradient: bool = False) -> Tensor:
    """Concatenates the rows of all processes, those of rank 0 first.

    The gradient rule, when `gradient` is True: the backward pass sums over the processes what each of them wants of
    the gathered rows, and every process takes the sum for its own rows. So if each process computes the *mean* loss of
    its own rows (against everybody's gathered rows) and the gradients of the parameters are *averaged* over the
    processes, as DDP and FSDP do, then N processes with B rows give the loss and the gradients of one process with
    N*B rows. Nothing is to be multiplied or divided by N.

    Args:
        tensor: Rows of this process, [B, ...]. B is the same in every process; where it differs use `gather_uneven`.
        gradient: Whether the gradient flows back to the processes that the rows came from. Must be the same in every
            process, since the backward pass communicates.

    Returns:
        [N*B, ...] with N processes, without gradient unless asked for; the tensor itself (detached unless `gradient`)
        in a single process.

    Raises:
        ValueError: If the tensor has no row dimension.
    """
    if tensor.dim() == 0:
        raise ValueError("gather() got a tensor without dimensions, expected rows [B, ...]: unsqueeze it first.")
    if not gradient:
        tensor = tensor.detach()
    if world_size() == 1:
        return tensor
    if gradient:
        gathered: Tensor = _GatherRows.apply(tensor)
        return gathered
    return _all_gather_rows(tensor)


def gather_uneven(tensor: Tensor) -> Tensor:
    """Concatenates the rows of all processes, whose numbers may differ or be zero, those of rank 0 first.

    For evaluation: no gradient, and the host waits for the row counts. A CPU tensor travels through the GPU where the
    process group is NCCL's, and comes back as a CPU tensor.

    Args:
        tensor: Rows of this process, [B_r, ...]; all other dimensions and the type are the same in every process.

    Returns:
        [sum of all B_r, ...], on the device of the argument.

    Raises:
        ValueError: If the tensor has no row dimension.
    """
    if tensor.dim() == 0:
        raise ValueError("gather_uneven() got a tensor without dimensions, expected rows [B, ...]: unsqueeze it first.")
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
    """Concatenates the texts of all processes, whose numbers may differ or be zero, those of rank 0 first."""
    if world_size() == 1:
        return list(texts)
    encoded = [text.encode() for text in texts]
    lengths = gather_uneven(torch.tensor([len(text) for text in encoded], dtype=torch.long))
    content = bytes(gather_uneven(torch.tensor(list(b"".join(encoded)), dtype=torch.uint8)).tolist())
    ends = list(accumulate(lengths.tolist()))
    return [content[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Returns the sum over all processes, without gradient; the argument stays as it is.

    For counts that differ by rank: `loss_sum * world_size() / all_reduce_sum(count)` on every rank, with averaged
    gradients, is the mean over all rows of all ranks.
    """
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor) -> Tensor:
    """Returns the largest value of all processes, element by element; the argument stays as it is."""
    return _all_reduce(tensor, dist.ReduceOp.MAX)


class LateMax:
    """The largest of a number that each process has, asked for in every step and not waited for.

    Where messages go through a GPU, the host would wait there for all work that is queued. So there `exchange` returns
    what was asked for at its last call, which is done by now, and the answer is one call late in all processes alike.
    """

    def __init__(self) -> None:
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    def exchange(self, number: int) -> int:
        """Send this call's number, and return the largest of all: of this call, or of the last one (0 at the first)."""
        if world_size() == 1:
            return number
        device = _device_for_communication(torch.empty(0))
        largest = torch.full((1,), number, device=device)  # made there, and not sent there
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if device.type == "cpu":
            return int(largest)
        answer = torch.empty(1, dtype=largest.dtype, pin_memory=True)
        answer.copy_(largest, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        before, self._asked = self._asked, (answer, arrived)
        if before is None:
            return 0
        before[1].synchronize()
        return int(before[0])


def broadcast(tensor: Tensor) -> None:
    """Overwrites a tensor with rank 0's, which has the same shape and type in every process."""
    if world_size() == 1:
        return
    content = tensor.detach().to(_device_for_communication(tensor))
    dist.broadcast(content, src=0)
    tensor.detach().copy_(content)


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Overwrites tensors with rank 0's, which have the same shapes and types in every process; one message a type."""
    if world_size() == 1:
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in alike.values():
        content = torch.cat([tensor.detach().flatten() for tensor in group])
        dist.broadcast(content, src=0)
        torch._foreach_copy_(
            group,
            [
                part.view_as(tensor)
                for part, tensor in zip(content.split([t.numel() for t in group]), group, strict=True)
            ],
        )


def keep_from_ddp(module: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Keeps buffers out of what DDP sends before every forward pass, because all processes have the same anyway.

    Call it before the module is wrapped: in `setup`, of a callback or of the module.

    Args:
        module: What DDP will wrap.
        parts: Submodules of it, whose buffers stay where they are.
    """
    kept = {id(buffer) for part in parts for buffer in part.buffers()}
    names = {name for name, buffer in module.named_buffers(remove_duplicate=False) if id(buffer) in kept}
    others = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted({*others, *names}))


class _GatherRows(torch.autograd.Function):
    """All-gather whose backward pass is the sum over the processes, of the own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = tensor.shape[0]
        return _all_gather_rows(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        own = total.new_empty((ctx.rows, *total.shape[1:]))
        dist.reduce_scatter_tensor(own, total)  # half of what an all-reduce sends
        return own


def _all_gather_rows(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:  # gloo does not carry it
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
    """NCCL carries GPU tensors only; every other backend takes the tensor where it is."""
    if tensor.device.type == "cpu" and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device
