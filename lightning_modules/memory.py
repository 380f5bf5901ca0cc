"""Large batches on small memory: a function runs over slices of its batch, and keeps no activations of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(
    function: Callable[..., Any], *inputs: Any, again: Callable[[], AbstractContextManager[Any]] | None = None
) -> Any:
    """Call `function`; its activations are dropped and computed again in the backward pass.

    Random draws repeat, so the result is that of the plain call. Without gradient it is the plain call.

    Args:
        function: tensors in, tensors out.
        *inputs: its arguments.
        again: makes the context of the second call.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    if again is None:  # torch.compile knows no contexts here
        return checkpoint(function, *inputs, use_reentrant=False)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))


def in_slices(
    function: Callable[..., tuple[Tensor, ...]],
    size: int | list[int] | None,
    *inputs: Tensor,
    again: Callable[[], AbstractContextManager[Any]] | None = None,
) -> tuple[Tensor, ...]:
    """Call `function` on slices of its inputs' rows and join what it returns.

    The backward pass runs each slice again and frees it before the next, so that the activations of one slice are the
    most that is held: one loss and one backward pass over a batch of any size, at the price of a second forward pass.
    Exact where no row depends on the others of its slice, as with everything but a BatchNorm in train mode.

    Args:
        function: tensors with equally many rows in, a tuple of tensors with a row dimension out.
        size: rows of a slice, or of each slice; None calls the function once and keeps its activations.
        *inputs: tensors [B, ...].
        again: makes the context in which a slice runs for the second time.
    """
    if size is None:
        return function(*inputs)
    parts = [
        recomputed(function, *rows, again=again)
        for rows in zip(*(tensor.split(size) for tensor in inputs), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
