"""Large batches in little memory: slices of a batch whose activations are recomputed in the backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(
    function: Callable[..., Any], *inputs: Any, again: Callable[[], AbstractContextManager[Any]] | None = None
) -> Any:
    """Call a function whose activations are recomputed in the backward pass.

    Random draws are repeated, so the result equals that of a plain call. Without gradients it is a plain call.

    Args:
        function: tensors in, tensors out.
        *inputs: arguments of the function.
        again: returns the context in which the function is called for the second time.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    if again is None:  # torch.compile does not support `context_fn`
        return checkpoint(function, *inputs, use_reentrant=False)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))


def in_slices(
    function: Callable[..., tuple[Tensor, ...]],
    size: int | list[int] | None,
    *inputs: Tensor,
    again: Callable[[], AbstractContextManager[Any]] | None = None,
) -> tuple[Tensor, ...]:
    """Call a function on slices of the rows of its inputs, and concatenate the results.

    The backward pass recomputes one slice at a time, so that activations of a single slice are held: one loss and one
    backward pass over a batch of any size, for a second forward pass. The result is exact if rows do not depend on one
    another, which only BatchNorm in train mode violates.

    Args:
        function: tensors with equally many rows in, a tuple of tensors with a row dimension out.
        size: rows of a slice, or of each slice; None calls the function once and keeps its activations.
        *inputs: tensors [B, ...].
        again: returns the context in which a slice is recomputed.
    """
    if size is None:
        return function(*inputs)
    parts = [
        recomputed(function, *rows, again=again)
        for rows in zip(*(tensor.split(size) for tensor in inputs), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
