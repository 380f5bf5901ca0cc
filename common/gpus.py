"""GPUs: memory, its bandwidth, and the highest rate of arithmetic."""

from fnmatch import fnmatch
from typing import NamedTuple


class GPU(NamedTuple):
    """A GPU.

    Attributes:
        device: pattern of the name that CUDA gives it.
        memory: bytes; a GB is 10^9.
        bandwidth: bytes per second of the memory.
        half: operations per second of dense matrix products in bfloat16 and float16, accumulated in float32, without
            sparsity.
        tf32: the same in TF32; None where there is none.
        full: operations per second in float32, without TF32.
        bfloat16: whether its tensor cores compute in bfloat16; without, `half` is that of float16.
    """

    device: str
    memory: float
    bandwidth: float
    half: float
    tf32: float | None
    full: float
    bfloat16: bool = True

    def rate(self, precision: str, tf32: bool = False) -> float | None:
        """Return operations per second in a precision of Lightning's; None if the table does not have it.

        Args:
            precision: such as "bf16-mixed" or "32-true".
            tf32: whether matrix products of float32 may be computed in TF32.
        """
        if precision.startswith("16-") or (precision.startswith("bf16-") and self.bfloat16):
            return self.half
        if precision != "32-true":
            return None
        return self.tf32 if tf32 and self.tf32 is not None else self.full


GPUS = {
    # NVIDIA HGX B200 data sheet: an eighth of 1.44 TB, 64 TB/s, 600 TFLOP/s in float32, and with sparsity 36 PFLOP/s in
    # bfloat16 and 18 in TF32.
    "b200": GPU("NVIDIA B200", 180e9, 8e12, 2250e12, 1125e12, 75e12),
    # NVIDIA H200 Tensor Core GPU data sheet, SXM.
    "h200": GPU("NVIDIA H200", 141e9, 4.8e12, 989e12, 494e12, 67e12),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM.
    "h100": GPU("NVIDIA H100 80GB HBM3", 80e9, 3.35e12, 989e12, 494e12, 67e12),
    # NVIDIA A100 Tensor Core GPU data sheet, SXM, 80 GB and 40 GB.
    "a100": GPU("NVIDIA A100*80GB*", 80e9, 2.039e12, 312e12, 156e12, 19.5e12),
    "a100-40": GPU("NVIDIA A100*40GB*", 40e9, 1.555e12, 312e12, 156e12, 19.5e12),
    # NVIDIA L40S data sheet.
    "l40s": GPU("NVIDIA L40S", 48e9, 864e9, 362e12, 183e12, 91.6e12),
    # NVIDIA L4 Tensor Core GPU data sheet, whose 242 and 120 TFLOP/s are with sparsity.
    "l4": GPU("NVIDIA L4", 24e9, 300e9, 121e12, 60e12, 30.3e12),
    # NVIDIA A10 Tensor Core GPU data sheet.
    "a10": GPU("NVIDIA A10", 24e9, 600e9, 125e12, 62.5e12, 31.2e12),
    # NVIDIA T4 data sheet, whose 65 TFLOP/s are in float16.
    "t4": GPU("Tesla T4", 16e9, 320e9, 65e12, None, 8.1e12, bfloat16=False),
    # NVIDIA V100 data sheet, SXM2, 32 GB, whose 125 TFLOP/s are in float16.
    "v100": GPU("*V100-SXM2*", 32e9, 900e9, 125e12, None, 15.7e12, bfloat16=False),
    # NVIDIA RTX A6000 data sheet, whose 309.7 TFLOP/s are with sparsity; TF32 in the GA102 architecture's white paper.
    "a6000": GPU("NVIDIA RTX A6000", 48e9, 768e9, 154.8e12, 77.4e12, 38.7e12),
    # NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090, tensor cores with float32 accumulation.
    "3090": GPU("NVIDIA GeForce RTX 3090", 24e9, 936e9, 71e12, 35.6e12, 35.6e12),
    # NVIDIA Ada GPU architecture white paper, GeForce RTX 4090, tensor cores with float32 accumulation.
    "4090": GPU("NVIDIA GeForce RTX 4090", 24e9, 1.008e12, 165.2e12, 82.6e12, 82.6e12),
    # NVIDIA RTX Blackwell GPU architecture white paper, GeForce RTX 5090, tensor cores with float32 accumulation.
    "5090": GPU("NVIDIA GeForce RTX 5090", 32e9, 1.792e12, 209.5e12, 104.8e12, 104.8e12),
}
"""Numbers of NVIDIA's data sheets and white papers."""


def gpu_of_device(name: str) -> GPU | None:
    """Return the GPU of a device by the name that CUDA gives it; None if it is unknown, or a part of a GPU (MIG).

    Args:
        name: such as "NVIDIA H100 80GB HBM3".
    """
    return next((gpu for gpu in GPUS.values() if fnmatch(name, gpu.device) and "MIG" not in name), None)
