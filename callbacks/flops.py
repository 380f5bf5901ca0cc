"""Floating-point operations of training steps, and the highest rate of a device."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from ..common.gpus import gpu_of_device
from .private_api import DispatchMode


class CountFlops(DispatchMode):
    """Count the operations of matrix products, convolutions and attention inside the context, from their shapes.

    Unlike torch's `FlopCounterMode` it follows no modules, which would add hooks to each, and runs operations without a
    formula, such as a Triton kernel, as they are.

    Attributes:
        flops: number of operations.
        failed: error of a formula of torch's, which does not know all shapes; the number is then too small.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.failed: Exception | None = None

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(getattr(func, "overloadpacket", func))) is not None:
            try:
                self.flops += formula(*args, **kwargs, out_val=result)
            except Exception as error:  # must not end a training
                self.failed = error
        return result


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the highest rate of a device in operations per second, by its data sheet; None if it is unknown.

    Lightning's table (`get_available_flops`) has rates with sparsity for some GPUs, and takes an L40S for an L4.

    Args:
        device: of the process.
        precision: of the Trainer, such as "bf16-mixed".
    """
    gpu = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return gpu and gpu.rate(precision, tf32=torch.get_float32_matmul_precision() != "highest")
