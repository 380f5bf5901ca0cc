"""What a process sends in a run, in order: NCCL's rules are checked on it without NCCL.

NCCL needs the same operations, types and sizes in the same order in all processes, and tensors on GPUs. Object
collectives, which pickle on the host, wait for the device twice.
"""

from functools import wraps

import torch
import torch.distributed as dist
from lightning import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlightning.callbacks.stopping import act_last

OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list")


class Collectives(TorchDispatchMode):
    """Records the operations of process groups as (name, tensors as (type, device, shape), reduction)."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self._own = {}
        self.on = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves((args, kwargs or {}))
            tensors = [
                (str(leaf.dtype), leaf.device.type, list(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)
            ]
            reductions = [leaf for leaf in leaves if isinstance(leaf, str)]
            reductions += [_reduction(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
            self.calls.append((function.overloadpacket.__name__, tensors, sorted(filter(None, reductions))))
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        for name in OBJECTS:
            self._own[name] = getattr(dist, name)
            setattr(dist, name, self._recorded(name))
        self.on = True
        return super().__enter__()

    def __exit__(self, *exception):
        for name, function in self._own.items():
            setattr(dist, name, function)
        self.on = False
        return super().__exit__(*exception)

    def _recorded(self, name):
        function = self._own[name]

        @wraps(function)
        def record(*args, **kwargs):
            self.calls.append((f"object: {name}", [], []))
            return function(*args, **kwargs)

        return record


def _reduction(leaf):
    try:
        return str(dist.ReduceOp.unbox(leaf).op)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # a process group


class RecordCollectives(Callback):
    """Records a fit, in which entries "batch" and "end of batch" surround a training step."""

    def __init__(self):
        self.recorded = Collectives()

    def setup(self, trainer, pl_module, stage):
        act_last(trainer, self)

    def on_train_start(self, trainer, pl_module):
        self.recorded.__enter__()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.recorded.calls.append(("batch", [], []))

    def on_train_batch_end(self, trainer, *_):
        self.recorded.calls.append(("end of batch", [], []))

    def on_train_end(self, trainer, pl_module):
        self.recorded.__exit__(None, None, None)

    def on_exception(self, trainer, pl_module, exception):
        if self.recorded.on:
            self.recorded.__exit__(None, None, None)


def object_collectives_in_steps(calls):
    """Return the object collectives between "batch" and "end of batch"."""
    found, inside = [], False
    for name, *_ in calls:
        inside = name == "batch" or (inside and name != "end of batch")
        if inside and name.startswith("object: "):
            found.append(name)
    return found


def first_difference(ranks):
    """Return the first call that is not the same in all processes, by rank; None if there is none."""
    longest = max(len(calls) for calls in ranks)
    for number in range(longest):
        calls = [rank[number] if number < len(rank) else None for rank in ranks]
        if any(call != calls[0] for call in calls):
            return calls
    return None
