"""GPUs: memory, and the highest rate of arithmetic."""

from typing import NamedTuple

from ..common.errors import UserError
from ..common.names import did_you_mean


class GPU(NamedTuple):
    """A GPU.

    Attributes:
        memory: bytes; a GB is 10^9.
        half: operations per second of dense matrix products in bfloat16 (V100: float16), without sparsity.
        full: operations per second in float32, without TF32.
    """

    memory: float
    half: float
    full: float


GPUS = {
    "h100": GPU(80e9, 989e12, 67e12),
    "h200": GPU(141e9, 989e12, 67e12),
    "a100": GPU(80e9, 312e12, 19.5e12),
    "a100-40": GPU(40e9, 312e12, 19.5e12),
    "l40s": GPU(48e9, 362e12, 91.6e12),
    "v100": GPU(32e9, 125e12, 15.7e12),
}
"""Numbers of NVIDIA's data sheets: H100 (SXM), H200 (SXM), A100 (SXM, 80 and 40 GB), L40S, V100 (SXM2, 32 GB)."""


def gpu_of(name: str) -> GPU:
    """Return a GPU by its name, in any case.

    Raises:
        UserError: If it is not in the table.
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise UserError(f"Expected the name of a GPU after --gpu, got {name!r}: {did_you_mean(name, GPUS)}")
    return found
