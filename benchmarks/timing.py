"""Timing for benchmarks of training steps: interleaved calls, medians, precisions."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

PRECISIONS = ("32-true", "bf16-mixed")


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a precision in which Lightning runs a step."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()


def seconds(function: Callable[[], Any]) -> float:
    """Return the wall time of a call in seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def medians(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each function over interleaved calls, after one warm-up call."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            taken = seconds(function)
            if repeat:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}
