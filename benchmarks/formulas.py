"""What a training step of a contrastive method holds and sends in a process: one formula for each kind of tensor.

n pairs in all processes together, N processes, b = n / N pairs in each. Sizes are in bytes. Tests compare the formulas
with what is allocated and sent; `large_batches.py` prints them for large n.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from vlightning.lightning_modules import ALBEFModule, CoCoRDModule, MMLGModule, MobileCLIPModule, SHReModule
from vlightning.lightning_modules.base.frozen import Frozen

FLOAT, LONG = 4, 8


@dataclass(frozen=True)
class Run:
    """How a method is trained.

    Args:
        pairs: n, a multiple of `processes`.
        processes: N.
        micro_batch_size: as of the modules.
        loss_rows: as of the modules that have it; ALBEF takes `micro_batch_size` for its logits too.
        sharded: whether parameters, gradients and optimizer state are divided among the processes.
    """

    pairs: int
    processes: int
    micro_batch_size: int | None = None
    loss_rows: int | None = None
    sharded: bool = False

    @property
    def rows(self) -> int:
        """B, of a process."""
        return self.pairs // self.processes


@dataclass(frozen=True)
class Tables:
    """Logits of rows and columns, float32, and what is computed from them; bytes of an entry, of all tables together.

    Args:
        queue: columns beside the batch's.
        batch: whether the n pairs of all processes are columns.
        kept: what stays until the backward pass when nothing is computed again.
        most: what is held at a time then.
        slice: what is held at a time when slices of the rows are computed again.
    """

    queue: int
    batch: bool
    kept: int
    most: int
    slice: int

    def columns(self, run: Run) -> int:
        """Of a table."""
        return self.queue + self.batch * run.pairs

    def kept_bytes(self, run: Run) -> int:
        """Until the backward pass; nothing with slices."""
        return self.kept * run.rows * self.columns(run)

    def most_bytes(self, run: Run, slice_rows: int | None) -> int:
        """At a time."""
        if slice_rows is None:
            return self.most * run.rows * self.columns(run)
        return self.slice * min(slice_rows, run.rows) * self.columns(run)


@dataclass(frozen=True)
class Method:
    """What a method's formulas depend on; everything in bytes but for `moments` and `counts`.

    Args:
        trained: parameters that have a gradient.
        averaged: parameters that follow them as moving averages.
        frozen: parameters that stay as they are, a teacher's above all.
        asked: averaged and frozen parameters that a step runs.
        moments: copies of the trained parameters that the optimizer keeps (AdamW 2, SGD with momentum 1).
        buffers: what DDP sends before each forward pass: statistics of BatchNorm, position numbers; not queues nor a
            frozen teacher's.
        features: of a pair, gathered with gradient.
        keys: of a pair, gathered without: teachers' features, keys of a queue.
        ids: of a pair, gathered: numbers of images, labels.
        counts: numbers of this batch (float32) that are summed over the processes.
        queue: keys of earlier batches.
        tables: of logits.
        slices_loss: whether `micro_batch_size` slices the logits too.
    """

    trained: int
    averaged: int
    frozen: int
    asked: int
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
    """Bytes of a pair that a network keeps for its backward pass; found by counting, not by a formula.

    Args:
        all: of the whole step, with nothing computed again.
        slice: of the sliced function that keeps most.
        between: what goes into the slices and comes out of them, and stays.
        batch: images and tokens.
    """

    all: int
    slice: int
    between: int
    batch: int


class Exchange(NamedTuple):
    """Operations of a kind in a step, as in `traffic.Total`, of a whole step."""

    operation: str
    calls: int
    bytes: int


def model_memory(method: Method, run: Run) -> dict[str, int]:
    """Bytes of a process that do not depend on the batch; a share of them where they are sharded, but for rounding."""
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
    """Bytes of a process that grow with its batch or everybody's; the most at a time, kind by kind."""
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
    """Bytes of what is gathered from all processes; in one process nothing is copied."""
    return 0 if run.processes == 1 else (method.features + method.keys + method.ids) * run.pairs


def traffic(method: Method, run: Run, flags: bool = True) -> dict[str, Exchange]:
    """What DDP's processes hand to the process group in a step, by kind; nothing else is sent.

    Args:
        method: of the step.
        run: as above.
        flags: those of `SkipNonFiniteSteps` and `StopOnSignal`.
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
    """The least that FSDP2 sends of parameters and gradients.

    It is in place of "gradients" of `traffic`, and of "buffers" but for BatchNorm's. Every parameter that a step
    runs is gathered once, and its gradient goes to whom it belongs. A block is gathered again for its backward
    pass, and what a network has beside its blocks once more for each of its methods that are called:
    `tests/test_large_batches.py` compares with what is sent.
    """
    return {
        "parameters": Exchange("all-gather", 1, (method.trained + method.asked) // run.processes),
        "gradients": Exchange("reduce-scatter", 1, method.trained),
    }


def describe(module: Any) -> Method:
    """A method's sizes, from a module after its `setup`, on whatever device, "meta" too.

    Args:
        module: of one of the five methods.

    Raises:
        TypeError: for any other module.
    """
    for kind, sizes in _SIZES.items():
        if isinstance(module, kind):
            return sizes(module, _networks(module))
    raise TypeError(f"{type(module).__name__} is none of {', '.join(kind.__name__ for kind in _SIZES)}.")


def _networks(module: Any) -> dict[str, Any]:
    """Bytes of the parameters by what becomes of them, of queues, and of other buffers that DDP sends."""
    pairs = module.momentum_pairs() if hasattr(module, "momentum_pairs") else {}
    averages = [module.get_submodule(pair.target) for pair in pairs.values()]
    following = {id(parameter) for average in averages for parameter in average.parameters()}
    found = {"trained": 0, "averaged": 0, "frozen": 0}
    for parameter in module.parameters():
        fate = "trained" if parameter.requires_grad else "averaged" if id(parameter) in following else "frozen"
        found[fate] += parameter.nbytes
    queues = module.queues().values() if hasattr(module, "queues") else []
    taught = [part for part in module.modules() if isinstance(part, Frozen)]
    alike = {id(buffer) for part in (*queues, *taught) for buffer in part.buffers()}
    found["queue"] = sum(buffer.nbytes for queue in queues for buffer in queue.buffers())
    found["asked"] = found["averaged"] + found["frozen"]
    found["buffers"] = sum(buffer.nbytes for buffer in module.buffers() if id(buffer) not in alike)
    return found


def _albef(module: Any, networks: dict[str, Any]) -> Method:
    keys = 2 * module.contrast.embed_dim * FLOAT
    return Method(
        moments=2,
        features=0,
        keys=keys,
        ids=LONG,
        counts=1 + module.mlm,
        # In both directions: the cosine (for the temperature), its log-probability and its target.
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
        # The log-probability; the key of the row itself is one more column.
        tables=Tables(module.contrast.queue_size + 1, False, kept=4, most=12, slice=12),
        **networks,
    )


def _mmlg(module: Any, networks: dict[str, Any]) -> Method:
    taught = bool(module.distillation.distillation_weight)
    return Method(
        moments=2,
        features=2 * module.student.sizes.embed_dim * FLOAT,
        keys=2 * _width(module.teacher.network) * FLOAT if taught else 0,
        ids=0,
        counts=0,
        tables=clip_tables(2, teachers=int(taught)),
        **networks,
    )


def _mobileclip(module: Any, networks: dict[str, Any]) -> Method:
    hparams = module.hparams
    kinds = 2 if hparams["captions"] == "both" else 1
    width, teachers = _width(module.student), len(module.teachers.dims) if module.teacher.distillation_weight else 0
    return Method(
        moments=2,
        features=(1 + kinds) * width * FLOAT,
        keys=(1 + kinds) * sum(module.teachers.dims) * FLOAT if teachers else 0,
        ids=0,
        counts=0,
        tables=clip_tables(2 * kinds, teachers),
        **networks | {"asked": networks["frozen"]},  # the average is for evaluation
    )


def _shre(module: Any, networks: dict[str, Any]) -> Method:
    widths = [module.student.widths[name] for name in module.scales]
    masks = module.contrast.mask_same_image
    return Method(
        moments=2,
        features=2 * sum(widths) * FLOAT,
        keys=0,
        ids=LONG * masks,
        counts=0,
        tables=clip_tables(2 * len(widths), 0, masks),
        **networks,
    )


def clip_tables(number: int, teachers: int, masks: bool = False) -> Tables:
    """Of `contrast_terms`: each keeps the student's log-probability, the teachers' mean probability, and who is masked.

    Args:
        number: of tables.
        teachers: whose distributions are learned.
        masks: whether pairs of the same image are left out.
    """
    kept = 4 + 4 * (teachers > 0) + masks
    one = 12 + masks + (12 + 4 * (teachers > 1) if teachers else 0)  # of the table that is computed
    return Tables(0, True, kept=number * kept, most=(number - 1) * kept + one, slice=one)


def _width(network: Any) -> int:
    """Of a CLIP's features."""
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
