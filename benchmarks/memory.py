"""Measure the bytes that a computation saves for its backward pass, and its peak memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


def saved_bytes(
    function: Callable[[], Any], counts: Callable[[Tensor], bool] = lambda _: True, without: Sequence[Tensor] = ()
) -> int:
    """Return the bytes of the tensors that autograd saves during a call; shared memory counts once.

    Args:
        function: function without arguments.
        counts: whether a tensor counts.
        without: tensors whose memory does not count, such as parameters and the batch.
    """
    kept: list[Tensor] = []  # references, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        if counts(tensor):
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return storage_bytes(kept, without)


def storage_bytes(tensors: Sequence[Tensor], without: Sequence[Tensor] = ()) -> int:
    """Return the bytes of the storages of tensors, each storage once, without the storages of other tensors."""
    places = {place(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    there = {place(tensor) for tensor in without}
    return sum(number for where, number in places.items() if where not in there)


class Held(NamedTuple):
    """Bytes on the CPU beyond those before a call."""

    most: int  # at the peak
    after: int  # of the result, and of the tensors that it refers to
    total: int  # allocated during the call


def held_bytes(function: Callable[[], Any]) -> Held:
    """Measure the memory of a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    results: Any = found.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    del result  # not before the profiler has stopped
    most = now = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return Held(most, now, sum(max(change, 0) for _, change in changes))


def place(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage."""
    return tensor.untyped_storage()._cdata
