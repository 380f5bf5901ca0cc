"""Switches for a step that is counted on fake tensors, which have shapes but no values, on a CPU for a GPU.

A step chooses some shapes and kernels by its device or by values.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

_HAVE_VALUES = ContextVar("have_values", default=True)
_AS_ON_GPU = ContextVar("as_on_gpu", default=False)


@contextmanager
def switched(switch: ContextVar[bool], value: bool) -> Iterator[None]:
    """Set a switch inside the context."""
    token = switch.set(value)
    try:
        yield
    finally:
        switch.reset(token)


def without_values() -> AbstractContextManager[None]:
    """Let a step on a CPU choose the sizes of its tensors by bounds instead of values, as on a GPU."""
    return switched(_HAVE_VALUES, False)


def gpu_attention() -> AbstractContextManager[None]:
    """Let a step on a CPU choose the attention kernels of a GPU."""
    return switched(_AS_ON_GPU, True)


def may_read_values(device: torch.device) -> bool:
    """Return whether a step may read values of a device's tensors, for which it does not wait: on a CPU."""
    return device.type == "cpu" and _HAVE_VALUES.get()


def attends_as_gpu(device: torch.device) -> bool:
    """Return whether attention on a device uses the kernels of a GPU."""
    return device.type != "cpu" or _AS_ON_GPU.get()
