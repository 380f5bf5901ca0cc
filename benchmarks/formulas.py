"""Formulas for the memory and traffic of a process in a training step of a contrastive method, by kind of tensor.

n pairs in all processes together, N processes, b = n / N pairs in each. Sizes are in bytes. Tests compare the formulas
with measurements; `large_batches.py` evaluates them for large n.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from vlightning.lightning_modules import (
    ALBEFModule,
    CoCoRDModule,
    MMLGModule,
    MobileCLIPModule,
    SHReModule,
)
from vlightning.lightning_modules.core.frozen import Frozen

FLOAT, LONG = 4, 8


@dataclass(frozen=True)
class Run:
    """Configuration of a training.

    Args:
        pairs: number of pairs n, a multiple of `processes`.
        processes: number of processes N.
        micro_batch_size: the modules' setting of that name.
        loss_rows: the modules' setting of that name; ALBEF uses `micro_batch_size` for its logits too.
        sharded: whether parameters, gradients and optimizer state are sharded over the processes.
    """

    pairs: int
    processes: int
    micro_batch_size: int | None = None
    loss_rows: int | None = None
    sharded: bool = False

    @property
    def rows(self) -> int:
        """Number of pairs b of a process."""
        return self.pairs // self.processes


@dataclass(frozen=True)
class Tables:
    """Memory of the tables of logits (float32) and of the tensors computed from them.

    Args:
        queue: number of columns beside the batch's.
        batch: whether the n pairs of all processes are columns.
        kept: bytes per entry, summed over the tables, that are saved for the backward pass without recomputation.
        most: bytes per entry at the peak, without recomputation.
        slice: bytes per entry at the peak, when slices of the rows are recomputed.
    """

    queue: int
    batch: bool
    kept: int
    most: int
    slice: int

    def columns(self, run: Run) -> int:
        """Return the number of columns of a table."""
        return self.queue + self.batch * run.pairs

    def kept_bytes(self, run: Run) -> int:
        """Return the bytes that are saved for the backward pass, without slices."""
        return self.kept * run.rows * self.columns(run)

    def most_bytes(self, run: Run, slice_rows: int | None) -> int:
        """Return the bytes at the peak."""
        if slice_rows is None:
            return self.most * run.rows * self.columns(run)
        return self.slice * min(slice_rows, run.rows) * self.columns(run)


@dataclass(frozen=True)
class Method:
    """Sizes of a method, in bytes except `moments` and `counts`.

    Args:
        trained: parameters with gradients.
        averaged: parameters of moving averages.
        frozen: frozen parameters, such as a teacher's.
        used: averaged and frozen parameters that a step uses.
        moments: number of copies of the trained parameters in the optimizer (AdamW 2, SGD with momentum 1).
        buffers: buffers that DDP broadcasts before each forward pass: statistics of BatchNorm and position ids, without
            queues and frozen teachers.
        features: features of a pair that are gathered with gradient.
        keys: features of a pair that are gathered without gradient: teachers' features, keys of a queue.
        ids: ids of a pair that are gathered: image ids, labels.
        counts: number of counts (float32) that are summed over the processes.
        queue: queues of keys.
        tables: tables of logits.
        slices_loss: whether `micro_batch_size` also slices the logits.
    """

    trained: int
    averaged: int
    frozen: int
    used: int
    moments: int
    buffers: int
    features: int
    keys: int
    ids: int
    counts: int
    queue: int
    tables: Tables
    slices_loss: bool = False


@dataclass(frozen=True)
class Activations:
    """Measured bytes per pair that are saved for the backward pass.

    Args:
        all: bytes of the whole step without recomputation.
        slice: bytes of the sliced function that saves most.
        between: inputs and outputs of the slices.
        batch: images and tokens.
    """

    all: int
    slice: int
    between: int
    batch: int


class Exchange(NamedTuple):
    """Collective operations of one kind in a step; fields as in `traffic.Total`."""

    operation: str
    calls: int
    bytes: int


def model_memory(method: Method, run: Run) -> dict[str, int]:
    """Return the bytes of a process that do not depend on the batch, by kind; without rounding of shards."""
    share = run.processes if run.sharded else 1
    return {
        "parameters": method.trained // share,
        "gradients": method.trained // share,
        "optimizer": method.moments * method.trained // share,
        "averages": method.averaged // share,
        "frozen teacher": method.frozen // share,
        "queue": method.queue,
    }


def batch_memory(method: Method, activations: Activations, run: Run) -> dict[str, int]:
    """Return the peak bytes of a process that depend on its batch or the global batch, by kind."""
    micro = run.micro_batch_size
    loss_rows = micro if method.slices_loss else run.loss_rows
    found = {
        "images and tokens": activations.batch * run.rows,
        "activations": activations.all * run.rows if micro is None else activations.slice * min(micro, run.rows),
        "between slices": 0 if micro is None else activations.between * run.rows,
        "gathered features": gathered(method, run),
        "gradients of features": method.features * run.pairs,
        "logits": method.tables.most_bytes(run, loss_rows),
    }
    return {kind: size for kind, size in found.items() if size}


def gathered(method: Method, run: Run) -> int:
    """Return the bytes of tensors gathered from all processes; 0 for a single process."""
    return 0 if run.processes == 1 else (method.features + method.keys + method.ids) * run.pairs


def traffic(method: Method, run: Run, flags: bool = True) -> dict[str, Exchange]:
    """Return all collective operations of a step under DDP, by kind.

    Args:
        method: sizes of the method.
        run: configuration of the training.
        flags: whether `SkipNonFiniteSteps` and `StopOnSignal` exchange flags.
    """
    if run.processes == 1:
        return {}
    b, n = run.rows, run.pairs
    found = {
        "features": Exchange("all-gather", 1, method.features * b),
        "gradients of features": Exchange("reduce-scatter", 1, method.features * n),
        "keys": Exchange("all-gather", 1, method.keys * b),
        "ids": Exchange("all-gather", 1, method.ids * b),
        "counts": Exchange("all-reduce", method.counts, FLOAT * method.counts),
        "gradients": Exchange("all-reduce", 1, method.trained),
        "buffers": Exchange("broadcast", 1, method.buffers),
        "flag: finite": Exchange("all-reduce", 1, LONG * flags),
        "flag: signal": Exchange("all-reduce", 1, LONG * flags),
        "flag: Lightning's": Exchange("broadcast", 1, LONG),
    }
    return {kind: exchange for kind, exchange in found.items() if exchange.bytes}


def sharded_traffic(method: Method, run: Run) -> dict[str, Exchange]:
    """Return the minimum that FSDP2 sends of parameters and gradients.

    It replaces "gradients" of `traffic`, and "buffers" except BatchNorm's. Every parameter that a step uses is gathered
    once, and its gradient is reduced to its owner. FSDP2 also gathers a block again for its backward pass, and the
    parameters outside of the blocks again for each method of the network that is called;
    `tests/guarantees/sharding/test_large_batches.py` compares with the measured traffic.
    """
    return {
        "parameters": Exchange("all-gather", 1, (method.trained + method.used) // run.processes),
        "gradients": Exchange("reduce-scatter", 1, method.trained),
    }


def describe(module: Any) -> Method:
    """Return the sizes of a method.

    Args:
        module: module of one of the five methods after `setup`, on any device, also "meta".

    Raises:
        TypeError: If the module is of another class.
    """
    for kind, sizes in _SIZES.items():
        if isinstance(module, kind):
            return sizes(module, _networks(module))
    raise TypeError(
        f"Expected one of {', '.join(kind.__name__ for kind in _SIZES)}, got {type(module).__name__}: add its sizes."
    )


def _networks(module: Any) -> dict[str, Any]:
    """Return the bytes of trained, averaged and frozen parameters, of queues, and of buffers that DDP broadcasts."""
    pairs = module.momentum_pairs() if hasattr(module, "momentum_pairs") else {}
    averages = [module.get_submodule(pair.target) for pair in pairs.values()]
    averaged = {id(parameter) for average in averages for parameter in average.parameters()}
    found = {"trained": 0, "averaged": 0, "frozen": 0}
    for parameter in module.parameters():
        role = "trained" if parameter.requires_grad else "averaged" if id(parameter) in averaged else "frozen"
        found[role] += parameter.nbytes
    queues = module.queues().values() if hasattr(module, "queues") else []
    frozen = [part for part in module.modules() if isinstance(part, Frozen)]
    excluded = {id(buffer) for part in (*queues, *frozen) for buffer in part.buffers()}
    found["queue"] = sum(buffer.nbytes for queue in queues for buffer in queue.buffers())
    found["used"] = found["averaged"] + found["frozen"]
    found["buffers"] = sum(buffer.nbytes for buffer in module.buffers() if id(buffer) not in excluded)
    return found


def _albef(module: Any, networks: dict[str, Any]) -> Method:
    keys = 2 * module.contrast.embed_dim * FLOAT
    return Method(
        moments=2,
        features=0,
        keys=keys,
        ids=(1 + module.contrast.match_same_text) * LONG,
        counts=1 + module.mlm,
        # Both directions save the cosine (for the temperature), its log-probability and its target.
        tables=Tables(module.contrast.queue_size, True, kept=24, most=36, slice=32),
        slices_loss=True,
        **networks,
    )


def _cocord(module: Any, networks: dict[str, Any]) -> Method:
    return Method(
        moments=1,
        features=0,
        keys=module.heads.embed_dim * FLOAT,
        ids=LONG,
        counts=0,
        # The log-probability is saved; the row's own key is one more column.
        tables=Tables(module.contrast.queue_size + 1, False, kept=4, most=12, slice=12),
        **networks,
    )


def _mmlg(module: Any, networks: dict[str, Any]) -> Method:
    distills = bool(module.distillation.distillation_weight)
    return Method(
        moments=2,
        features=2 * module.student.sizes.embed_dim * FLOAT,
        keys=2 * _width(module.teacher.network) * FLOAT if distills else 0,
        ids=0,
        counts=0,
        tables=clip_tables(2, teachers=int(distills)),
        **networks,
    )


def _mobileclip(module: Any, networks: dict[str, Any]) -> Method:
    hparams = module.hparams
    kinds = 2 if hparams["captions"] == "both" else 1
    width = _width(module.student)
    dims = module.teachers.dims if module.teacher.distillation_weight else []
    if dims and module.teacher.distilled is not None:
        dims = [dims[number] for number in module.teacher.distilled]
    teachers = len(dims)
    return Method(
        moments=2,
        features=(1 + kinds) * width * FLOAT,
        keys=(1 + kinds) * sum(dims) * FLOAT,
        ids=0,
        counts=0,
        tables=clip_tables(2 * kinds, teachers),
        **networks | {"used": networks["frozen"]},  # the average is used in evaluation only
    )


def _shre(module: Any, networks: dict[str, Any]) -> Method:
    widths = [module.student.widths[name] for name in module.scales]
    masks = module.contrast.mask_same_image + module.contrast.mask_same_text
    return Method(
        moments=2,
        features=2 * sum(widths) * FLOAT,
        keys=0,
        ids=LONG * masks,
        counts=0,
        tables=clip_tables(2 * len(widths), 0, masks > 0),
        **networks,
    )


def clip_tables(number: int, teachers: int, masks: bool = False) -> Tables:
    """Return the tables of `contrast_losses`, which save log-probability, mean probability of the teachers, and mask.

    Args:
        number: number of tables.
        teachers: number of teachers.
        masks: whether pairs of the same image are masked.
    """
    kept = 4 + 4 * (teachers > 0) + masks
    one = 12 + masks + (12 + 4 * (teachers > 1) if teachers else 0)  # the table being computed
    return Tables(0, True, kept=number * kept, most=(number - 1) * kept + one, slice=one)


def _width(network: Any) -> int:
    """Return the embedding dimension of a CLIP."""
    projection = getattr(network, "text_projection", None)
    if projection is None:
        projection = network.text.text_projection
    if isinstance(projection, nn.Linear):
        return projection.out_features
    return int(projection.shape[1])


_SIZES: dict[type, Callable[[Any, dict[str, Any]], Method]] = {
    ALBEFModule: _albef,
    CoCoRDModule: _cocord,
    MMLGModule: _mmlg,
    MobileCLIPModule: _mobileclip,
    SHReModule: _shre,
}
