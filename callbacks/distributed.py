"""Tensors across processes: every function here is the identity where there is only one process.

They talk to the default process group, whoever started it (Lightning, torchrun, a test).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
    tensor = tensor.detach()
    if world_size() == 1:
        return tensor.clone()
    total = tensor.to(_device_for_communication(tensor), copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)


def broadcast(tensor: Tensor) -> None:
    """Overwrites a tensor with rank 0's, which has the same shape and type in every process."""
    if world_size() == 1:
        return
    content = tensor.detach().to(_device_for_communication(tensor))
    dist.broadcast(content, src=0)
    tensor.detach().copy_(content)


class _GatherRows(torch.autograd.Function):
    """All-gather whose backward pass is the sum over the processes, cut to the own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = tensor.shape[0]
        return _all_gather_rows(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # A reduce-scatter would send half as much, but not every backend has it; these are feature vectors.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        start = rank() * ctx.rows
        return total[start : start + ctx.rows]


def _all_gather_rows(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:  # gloo does not carry it
        return _all_gather_rows(tensor.to(torch.uint8)).to(torch.bool)
    gathered = tensor.new_empty((world_size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous())
    return gathered


def _device_for_communication(tensor: Tensor) -> torch.device:
    """NCCL carries GPU tensors only; every other backend takes the tensor where it is."""
    if tensor.device.type == "cpu" and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device
