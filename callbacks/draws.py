"""Random draws by sample: functions of seed, step and position in the global batch, not of rank and batch of a process.

A draw is a hash of integer counters, computed by tensors on the device of its use: CPUs and GPUs give the same bits,
and the host does not wait. Rows are those of this process, rank 0's first in the global batch, as gathered rows are. So
N processes with batch B draw what one process with batch N x B draws, and a run can go on with another number of
processes.

`StepSeedCallback` provides the seed of each step. Without it each call takes its key from torch's generator of the CPU.
"""

import math

import torch
from torch import Tensor

from .distributed.collectives import rank, world_size

_WORD = 0xFFFFFFFF
_AT_ONCE = 1 << 24  # values of normally distributed draws; their integers take sixteen bytes each

_step: torch.Generator | None = None


def begin_step(seed: int | None) -> None:
    """Draw from a seed that is the same in all processes, from here on; None ends this."""
    global _step
    _step = None if seed is None else torch.Generator().manual_seed(seed)


@torch.compiler.disable
def draw_number() -> int:
    """Return a number of 62 bits, the same in all processes."""
    return int(torch.randint(1 << 62, (), generator=_step))


@torch.compiler.disable
def draw_bits(rows: int, columns: int | Tensor, device: torch.device, of_all: bool = False) -> Tensor:
    """Return integers of 32 bits, equally distributed.

    Args:
        rows: rows of this process; all processes have the same number.
        columns: number of columns C, or what the columns are called, long [C]: an equal name gives equal draws.
        device: where the draws are used.
        of_all: whether to return the rows of all processes.

    Returns:
        long [rows, C].
    """
    first, count = (0, rows * world_size()) if of_all else (rank() * rows, rows)
    return _bits(draw_number(), first, count, columns, device)


def draw_uniform(rows: int, columns: int | Tensor, device: torch.device) -> Tensor:
    """Return float32 values [rows, C] between 0 and 1, both excluded; arguments as in `draw_bits`."""
    return _uniform(draw_bits(rows, columns, device))


@torch.compiler.disable
def draw_normal(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return normally distributed float32 values [rows, C]; arguments as in `draw_bits`."""
    keys = (draw_number(), draw_number())
    first = rank() * rows
    size = max(1, _AT_ONCE // columns)
    parts = []
    for start in range(0, rows, size):  # integers of a part at a time
        length, angle = (_uniform(_bits(key, first + start, min(size, rows - start), columns, device)) for key in keys)
        parts.append((-2 * length.log()).sqrt() * (2 * math.pi * angle).cos())
    return torch.cat(parts)


def chosen_half(rows: int, device: torch.device) -> Tensor:
    """Return which rows of this process, boolean [rows], are in a random half of the global batch, at least one row."""
    ranks_of_rows = draw_bits(rows, 1, device, of_all=True)[:, 0].argsort(stable=True).argsort()
    return ranks_of_rows.narrow(0, rank() * rows, rows) < max(1, len(ranks_of_rows) // 2)


def global_positions(rows: int, device: torch.device) -> Tensor:
    """Return the positions of this process's rows in the global batch, long [rows]."""
    return rank() * rows + torch.arange(rows, device=device)


def _bits(key: int, first: int, rows: int, columns: int | Tensor, device: torch.device) -> Tensor:
    low = key & _WORD
    high = key >> 32
    row = torch.arange(first, first + rows, device=device)
    start = _mixed(_mixed(row + low).bitwise_xor_(high))
    factor = _mixed((start + 1).bitwise_and_(_WORD)) | 1
    column = torch.arange(columns, device=device) if isinstance(columns, int) else columns
    # An odd factor and a start of its own for each row, so that no two rows draw the same in another order.
    return _mixed((factor[:, None] * column).add_(start[:, None]).bitwise_and_(_WORD))


def _mixed(bits: Tensor) -> Tensor:
    """Hash integers of 32 bits in place, one to one: "lowbias32" of C. Wellons' hash-prospector.

    The second factor is less by 2^32 than the published one, which leaves the low 32 bits of products as they are, so
    that no product exceeds 64 bits.
    """
    bits &= _WORD
    bits ^= bits >> 16
    bits.mul_(0x7FEB352D).bitwise_and_(_WORD)
    bits ^= bits >> 15
    bits.mul_(0x846CA68B - (1 << 32)).bitwise_and_(_WORD)
    bits ^= bits >> 16
    return bits


def _uniform(bits: Tensor) -> Tensor:
    # 23 bits and a half: neither 0 nor 1 in float32.
    return (bits >> 9).float().add_(0.5).mul_(2.0**-23)
