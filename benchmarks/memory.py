"""Bytes that a computation keeps for its backward pass, and the most that it holds at a time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


def saved_bytes(
    function: Callable[[], Any], counts: Callable[[Tensor], bool] = lambda _: True, without: Sequence[Tensor] = ()
) -> int:
    """Bytes of the tensors that autograd keeps of a call; those that share memory count once.

    Args:
        function: without arguments.
        counts: which tensors count.
        without: tensors that are there anyway, such as parameters and the batch.
    """
    kept: list[Tensor] = []  # held, so that no place in memory is taken twice

    def pack(tensor: Tensor) -> Tensor:
        if counts(tensor):
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return storage_bytes(kept, without)


def storage_bytes(tensors: Sequence[Tensor], without: Sequence[Tensor] = ()) -> int:
    """Bytes of the memory behind tensors, each piece once, but for that behind others."""
    places = {place(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    there = {place(tensor) for tensor in without}
    return sum(number for where, number in places.items() if where not in there)


class Held(NamedTuple):
    """Bytes on the CPU beyond what was there before."""

    most: int  # at a time
    after: int  # of the result, and of what it keeps alive


def held_bytes(function: Callable[[], Any]) -> Held:
    """What a call holds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    results: Any = found.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    del result  # not before the profiler has stopped
    most = now = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return Held(most, now)


def place(tensor: Tensor) -> int:
    """Names the memory behind a tensor."""
    return tensor.untyped_storage()._cdata
