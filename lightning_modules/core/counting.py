"""Switches for a step that is counted on fake tensors, which have shapes but no values, on a CPU for a GPU.

A step chooses some shapes and kernels by its device or by values. These functions say what it chooses by.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_HAVE_VALUES = ContextVar("have_values", default=True)
_AS_ON_GPU = ContextVar("as_on_gpu", default=False)


@contextmanager
def without_values() -> Iterator[None]:
    """Let a step on a CPU choose the sizes of its tensors by bounds instead of values, as on a GPU."""
    token = _HAVE_VALUES.set(False)
    try:
        yield
    finally:
        _HAVE_VALUES.reset(token)


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Let a step on a CPU choose the attention kernels of a GPU."""
    token = _AS_ON_GPU.set(True)
    try:
        yield
    finally:
        _AS_ON_GPU.reset(token)


def may_read_values(device: torch.device) -> bool:
    """Return whether a step may read values of a device's tensors, for which it does not wait: on a CPU."""
    return device.type == "cpu" and _HAVE_VALUES.get()


def attends_as_gpu(device: torch.device) -> bool:
    """Return whether attention on a device uses the kernels of a GPU."""
    return device.type != "cpu" or _AS_ON_GPU.get()
