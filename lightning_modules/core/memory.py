"""Little memory: slices of a batch whose activations are recomputed in the backward pass, and weights held once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ...common.ranges import COUNT, SettingsGroup


@dataclass(frozen=True)
class MemorySettings(SettingsGroup, option="memory"):
    """Large batches on small memory.

    Args:
        micro_batch_size: pairs that go through the towers at a time, at most, with activations computed again in the
            backward pass: the loss of the whole batch in the memory of a small one. Exact without BatchNorm. BatchNorm
            (MCi, MCt) normalizes each slice by its own statistics, and its running statistics move once a step,
            towards their mean over the slices. None means the whole batch.
        loss_rows: rows of the logits that are held at a time, computed again in the backward pass; None means all.
    """

    micro_batch_size: Annotated[int | None, COUNT] = None
    loss_rows: Annotated[int | None, COUNT] = None


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
        size: rows of a slice, at most, or of each slice; None calls the function once and keeps its activations. Slices
            of one given size are equally long, or nearly so: no slice is a single row, which BatchNorm cannot
            normalize, unless the batch or the size is.
        *inputs: tensors [B, ...].
        again: returns the context in which a slice is recomputed.
    """
    if size is None:
        return function(*inputs)
    if isinstance(size, int):
        count = max(1, math.ceil(len(inputs[0]) / size))
        slices = [tensor.tensor_split(count) for tensor in inputs]
    else:
        slices = [tensor.split(size) for tensor in inputs]
    outputs = [recomputed(function, *rows, again=again) for rows in zip(*slices, strict=True)]
    return tuple(torch.cat(column) for column in zip(*outputs, strict=True))


class LeanMlp(Mlp):
    """timm's MLP, which keeps the hidden states only before the activation function, not after it.

    A matrix product keeps its input for the backward pass: four times the width of a block, a quarter of what a ViT
    block keeps. Here the activation function is recomputed instead, about one percent of a block's work; the product is
    not, because recomputation ends as soon as all saved tensors exist.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., V] to [..., V]."""
        return recomputed(self._second_half, self.fc1(x))

    def _second_half(self, hidden: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(hidden)))))


# Running statistics of BatchNorm, where a batch goes through a network in slices that are recomputed.

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def _training_norms(network: nn.Module) -> list[BatchNorm]:
    """Return the layers whose running statistics a forward pass would update."""
    return [
        module
        for module in network.modules()
        if isinstance(module, BatchNorm) and module.training and module.running_mean is not None
    ]


@contextmanager
def kept_statistics(network: nn.Module) -> Iterator[None]:
    """Keep running statistics unchanged in the forward passes inside, such as recomputations."""
    norms = _training_norms(network)
    before = [(_statistics(norm).batches.clone(), norm.momentum) for norm in norms]
    for norm in norms:
        # Not `track_running_stats = False`: a recomputation would then save other tensors than the first pass.
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (count, momentum) in zip(norms, before, strict=True):
            _statistics(norm).batches.copy_(count)
            norm.momentum = momentum


@contextmanager
def one_update(network: nn.Module) -> Iterator[None]:
    """Count all forward passes inside as one batch: update running statistics once, by the mean of the passes."""
    norms = _training_norms(network)
    before: list[tuple[Tensor, Tensor, Tensor, float | None]] = []
    for norm in norms:
        mean, var, count = _statistics(norm)
        before.append((mean.clone(), var.clone(), count, norm.momentum))
        norm.momentum = None  # the mean over the passes since the count was zero
        # The layer divides by the count, and would synchronize in each pass if the count were on the device.
        norm.num_batches_tracked = torch.zeros_like(count, device="cpu")
    try:
        yield
    finally:
        with torch.no_grad():
            for norm, (old_mean, old_var, count, momentum) in zip(norms, before, strict=True):
                mean, var, passes = _statistics(norm)
                norm.num_batches_tracked = count
                norm.momentum = momentum
                if not passes:
                    continue
                count.add_(1)
                share = momentum if momentum is not None else 1 / count.to(mean.dtype)
                mean.copy_(torch.lerp(old_mean, mean, share))
                var.copy_(torch.lerp(old_var, var, share))


class _Statistics(NamedTuple):
    """Running statistics of a layer."""

    mean: Tensor
    var: Tensor
    batches: Tensor


def _statistics(norm: BatchNorm) -> _Statistics:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    return _Statistics(norm.running_mean, norm.running_var, norm.num_batches_tracked)


# Weights held once


class _WeightsInPlace(TorchFunctionMode):
    """See `weights_in_place`."""

    _DRAWS = frozenset({Tensor.normal_, Tensor.uniform_})

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function in self._DRAWS or getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        if function is Tensor.copy_ and len(args) == 2 and not given and _takes(*args):
            args[0].data = args[1]
            return args[0]
        return function(*args, **given)


def _takes(parameter: Tensor, values: Any) -> bool:
    """Return whether values can be those of a parameter as they are."""
    return (
        isinstance(parameter, nn.Parameter)
        and type(values) is Tensor
        and (values.shape, values.dtype, values.device) == (parameter.shape, parameter.dtype, parameter.device)
        and values.is_contiguous()
    )


def weights_in_place() -> AbstractContextManager[Any]:
    """Let networks that are built and filled in this context hold the tensors of the file in place of copies.

    Parameters are not initialized, so that all of them have to be filled; their own memory is never touched. Tensors of
    a safetensors file are mapped: weights that are not used are not read.
    """
    return _WeightsInPlace()
