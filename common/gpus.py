"""GPUs: memory, and the highest rate of arithmetic."""

from fnmatch import fnmatch
from typing import NamedTuple


class GPU(NamedTuple):
    """A GPU.

    Attributes:
        device: pattern of the name that CUDA gives it.
        memory: bytes; a GB is 10^9.
        half: operations per second of dense matrix products in bfloat16 (V100: float16), without sparsity.
        tf32: the same in TF32; None where there is none.
        full: operations per second in float32, without TF32.
    """

    device: str
    memory: float
    half: float
    tf32: float | None
    full: float

    def rate(self, precision: str, tf32: bool = False) -> float | None:
        """Return operations per second in a precision of Lightning's; None if the table does not have it.

        Args:
            precision: such as "bf16-mixed" or "32-true".
            tf32: whether matrix products of float32 may be computed in TF32.
        """
        if precision.startswith(("16-", "bf16-")):
            return self.half
        if precision != "32-true":
            return None
        return self.tf32 if tf32 and self.tf32 is not None else self.full


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", 80e9, 989e12, 494e12, 67e12),
    "h200": GPU("NVIDIA H200", 141e9, 989e12, 494e12, 67e12),
    "a100": GPU("NVIDIA A100*80GB*", 80e9, 312e12, 156e12, 19.5e12),
    "a100-40": GPU("NVIDIA A100*40GB*", 40e9, 312e12, 156e12, 19.5e12),
    "l40s": GPU("NVIDIA L40S", 48e9, 362e12, 183e12, 91.6e12),
    "v100": GPU("*V100-SXM2*", 32e9, 125e12, None, 15.7e12),
}
"""Numbers of NVIDIA's data sheets: H100 (SXM), H200 (SXM), A100 (SXM, 80 and 40 GB), L40S, V100 (SXM2, 32 GB)."""


def gpu_of_device(name: str) -> GPU | None:
    """Return the GPU of a device by the name that CUDA gives it; None if it is unknown, or a part of a GPU (MIG).

    Args:
        name: such as "NVIDIA H100 80GB HBM3".
    """
    return next((gpu for gpu in GPUS.values() if fnmatch(name, gpu.device) and "MIG" not in name), None)
