"""A ring buffer of features, and the callback that fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ..common.errors import UserError
from ..common.names import did_you_mean
from ..common.private_api import averaged_model
from ..common.ranges import COUNT, NOT_NEGATIVE, CheckedArguments
from .distributed.collectives import broadcast, gather, keep_from_ddp
from .modules import accumulates, find_module, state_key
from .non_finite import is_skipped

NO_ID = torch.iinfo(torch.long).min
"""Id of a slot of a `FeatureQueue` without a row of the data; no data has this id."""


class FeatureQueue(CheckedArguments, nn.Module):
    """The last `size` feature rows that were enqueued, oldest overwritten first.

    All content is in persistent buffers, since it is part of the method's state: a resumed run has the same rows in the
    same slots. No operation makes the host wait for the device.

    Args:
        size: Number of rows. A queue of 0 rows stays empty.
        dim: Length of a row.
        ids: Number of integer ids of every row.
        random_start: Whether to start with random rows of unit length that count as filled, as MoCo and ALBEF do;
            otherwise with zeros, which `valid` masks until they are overwritten.

    Attributes:
        features: float32 [size, dim].
        ids: long [size], or [size, ids] with several, `NO_ID` in empty slots; None without `ids`.
        pointer: long, 0-D: slot of the next row.
        filled: long, 0-D: number of filled slots.
    """

    features: Tensor
    ids: Tensor | None
    pointer: Tensor
    filled: Tensor

    def __init__(
        self,
        size: Annotated[int, NOT_NEGATIVE],
        dim: Annotated[int, COUNT],
        ids: Annotated[int, NOT_NEGATIVE] = 0,
        random_start: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        self.dim = dim
        features = F.normalize(torch.randn(size, dim), dim=1) if random_start else torch.zeros(size, dim)
        self.register_buffer("features", features)
        empty = torch.full((size, ids), NO_ID)
        self.register_buffer("ids", (empty.squeeze(1) if ids == 1 else empty) if ids else None)
        self.register_buffer("pointer", torch.tensor(0))
        self.register_buffer("filled", torch.tensor(size if random_start else 0))

    @property
    def valid(self) -> Tensor:
        """Filled slots, bool [size]."""
        # Slots are filled from the first one on, so their number is enough.
        return torch.arange(self.size, device=self.filled.device) < self.filled

    def next_slots(self, rows: int) -> tuple[Tensor, ...]:
        """Return what `enqueue` of this number of rows would overwrite, for `put_back`."""
        slots = (self.pointer + torch.arange(min(rows, self.size), device=self.pointer.device)) % max(self.size, 1)
        content = [self.features[slots], *([] if self.ids is None else [self.ids[slots]])]
        return slots, self.pointer.clone(), self.filled.clone(), *content

    @torch.no_grad()
    def put_back(self, before: tuple[Tensor, ...]) -> None:
        """Undo the last `enqueue`, given what `next_slots` returned before it."""
        slots, pointer, filled, features, *ids = before
        self.features.index_copy_(0, slots, features)
        if self.ids is not None:
            self.ids.index_copy_(0, slots, *ids)
        self.pointer.copy_(pointer)
        self.filled.copy_(filled)

    @torch.no_grad()
    def enqueue(self, features: Tensor, ids: Tensor | None = None) -> None:
        """Write rows one after the other, each to the oldest slot.

        A row with a non-finite value is skipped, since it would spoil the loss of every later batch until it is
        overwritten.

        Args:
            features: [B, dim] with any B, also 0 and more than `size`.
            ids: long [B], or [B, ids], for a queue with ids.

        Raises:
            ValueError: If a shape is wrong, or ids are missing or unexpected.
        """
        self._check(features, ids)
        batch = features.shape[0]
        if batch == 0 or self.size == 0:
            return
        # The check comes after the conversion, which may overflow.
        features = features.to(device=self.features.device, dtype=self.features.dtype)
        finite = features.isfinite().all(dim=1)
        count = finite.sum()
        # Finite rows first, in their order. Only the last `kept` of them survive, and the others are not written, so
        # that the slots below are distinct; the host knows `kept`, but not `count`.
        order = torch.argsort(finite, descending=True, stable=True)
        kept = min(batch, self.size)
        turn = (count - kept).clamp(min=0) + torch.arange(kept, device=count.device)
        row = order[turn]
        slot = (self.pointer + turn) % self.size
        real = turn < count  # the other slots keep their content

        kept_features = torch.where(real[:, None], features[row], self.features[slot])
        self.features.index_copy_(0, slot, kept_features)
        if self.ids is not None and ids is not None:
            ids = ids.to(device=self.ids.device, dtype=self.ids.dtype)
            written = real if ids.dim() == 1 else real[:, None]
            self.ids.index_copy_(0, slot, torch.where(written, ids[row], self.ids[slot]))
        self.pointer.copy_((self.pointer + count) % self.size)
        self.filled.copy_((self.filled + count).clamp(max=self.size))

    @override
    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, ids={self._columns}"

    def _check(self, features: Tensor, ids: Tensor | None) -> None:
        if features.dim() != 2 or features.shape[1] != self.dim:
            raise ValueError(
                f"Expected features [B, {self.dim}], got features of shape {list(features.shape)}: enqueue rows of dim "
                "values."
            )
        if (ids is not None) != (self.ids is not None):
            expected, got = ("ids", "none") if ids is None else ("no ids", "ids")
            raise ValueError(
                f"Expected {expected} with the features, as the queue was made with ids={self._columns}, got "
                f"{got}: call FeatureQueue and enqueue() consistently."
            )
        if (
            ids is not None
            and self.ids is not None
            and ids.shape != (expected_shape := (len(features), *self.ids.shape[1:]))
        ):
            raise ValueError(
                f"Expected ids {list(expected_shape)}, {self._columns} for each row, got ids of shape "
                f"{list(ids.shape)}: give as many."
            )

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        features = state_dict.get(prefix + "features")
        if features is not None and tuple(features.shape) != (self.size, self.dim):
            raise UserError(
                f"Expected {self.size} rows of {self.dim} values in the checkpoint of the queue {prefix[:-1]!r}, got "
                f"{features.shape[0]} rows of {features.shape[1]}: give the queue the checkpoint's size and dim."
            )
        ids = state_dict.get(prefix + "ids")
        if ids is not None and self.ids is not None:
            state_dict[prefix + "ids"] = self.fitting_ids(ids)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def fitting_ids(self, ids: Tensor) -> Tensor:
        """Return ids of a queue with another number of ids in this queue's shape; missing ones are `NO_ID`."""
        assert self.ids is not None
        if ids.dim() == self.ids.dim() == 1:
            return ids
        columns = (ids[:, None] if ids.dim() == 1 else ids)[:, : self._columns]
        missing = columns.new_full((len(ids), self._columns - columns.shape[1]), NO_ID)
        return torch.cat([columns, missing], 1).reshape(len(ids), *self.ids.shape[1:])

    @property
    def _columns(self) -> int:
        return 0 if self.ids is None else self.ids.shape[1:].numel()


class QueueCallback(Callback):
    """Enqueue the keys of every training batch, after its loss and backward pass.

    A training step returns the keys beside the loss, `{"loss": ..., "keys": {name: [B, dim]}}`, with
    `"key_ids": {name: long [B]}`, or [B, ids], for a queue with ids. Keys are detached and gathered over all processes,
    rank 0's rows first, so that the queues of all processes are equal; a checkpoint holds rank 0's. A step that has
    gathered the keys for its loss returns `"keys_are_gathered": True`, and they are not gathered again. The queue is
    broadcast once, at the start, and excluded from DDP's `broadcast_buffers`, which would send it before every forward
    pass (537 MB for 65536 rows of 2048 values). All processes must have the same number of rows (`drop_last` in the
    training loader).

    A resumed run has exactly the queue of the checkpoint. To end like the uninterrupted run it also needs the same
    batches and the same random draws: see `StopOnSignal`.

    Lightning's `WeightAveraging` (and `EMAWeightAveraging`) would average the rows, the pointer and the ids of the
    queue, so this callback raises beside one, unless it has `use_buffers=False`. The averaged module then has the
    queue of the last update of the average.

    Batches that only accumulate gradients are enqueued too. A step that returns None enqueues nothing. A step that
    `SkipNonFiniteSteps` skips enqueues nothing either, and the rows of its earlier accumulated batches are removed.

    Args:
        queues: Attribute path of the queue by name of its keys; None uses the module's `queues()`, which returns the
            queues by name.
        log: Whether to log the filled share of each queue as `queue/<name>_filled`.
    """

    def __init__(self, queues: dict[str, str] | None = None, log: bool = True) -> None:
        super().__init__()
        if queues is not None and not queues:
            raise UserError(
                "Expected at least one queue for QueueCallback, got an empty dict: name one, or give None to ask the "
                "module."
            )
        self.queues = queues
        self.log = log
        self._overwritten: list[tuple[FeatureQueue, tuple[Tensor, ...]]] = []  # by the batches of this step

    @property
    @override
    def state_key(self) -> str:
        """Contain the queues' names, so that several instances have separate states."""
        return state_key(self, queues=None if self.queues is None else sorted(self.queues))

    def queues_of(self, pl_module: LightningModule) -> dict[str, FeatureQueue]:
        """Return the queues by name: those of the constructor's paths, else the module's `queues()`.

        Raises:
            UserError: If there are none, a path does not exist, or an object is not a FeatureQueue.
        """
        if self.queues is not None:
            return {
                name: find_module(pl_module, path, FeatureQueue, f"queue {name!r}")
                for name, path in self.queues.items()
            }
        ask = getattr(pl_module, "queues", None)
        queues: dict[str, FeatureQueue] = ask() if callable(ask) else {}
        if not queues:
            raise UserError(
                f"Expected queues for QueueCallback, got none from its arguments and none from queues() of "
                f"{type(pl_module).__name__}: pass queues={{'name': 'attribute path'}}, or add the method."
            )
        for name, queue in queues.items():
            if not isinstance(queue, FeatureQueue):
                raise UserError(
                    f"Expected a FeatureQueue as {name!r} from queues() of {type(pl_module).__name__}, got a "
                    f"{type(queue).__name__}: return a FeatureQueue."
                )
        return queues

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Exclude the queues from DDP's broadcast; this is a callback's last hook before DDP wraps the module."""
        if stage != "fit":
            return
        try:
            queues = list(self.queues_of(pl_module).values())
        except UserError:  # `configure_model` may still create them; otherwise `on_fit_start` raises
            return
        keep_from_ddp(pl_module, queues)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check every name before the first batch, and broadcast rank 0's queues."""
        _refuse_averaged_buffers(trainer)
        self._overwritten = []
        for queue in self.queues_of(pl_module).values():
            for buffer in queue.buffers():
                broadcast(buffer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_skipped(trainer):  # the loss or a gradient is non-finite
            for queue, before in reversed(self._overwritten):
                queue.put_back(before)
            self._overwritten = []
            return
        if not accumulates(trainer):
            self._overwritten = []
        if not outputs:  # the training step returned None
            return
        queues = self.queues_of(pl_module)
        keys = _keys_of(outputs, queues, type(pl_module).__name__)
        ids = outputs.get("key_ids") or {}
        spread: Callable[[Tensor], Tensor] = _as_they_are if outputs.get("keys_are_gathered") else gather
        for name, queue in queues.items():
            row_ids = ids.get(name)
            rows = spread(keys[name])
            if accumulates(trainer):
                self._overwritten.append((queue, queue.next_slots(len(rows))))
            try:
                queue.enqueue(rows, None if row_ids is None else spread(row_ids))
            except ValueError as error:
                raise UserError(f"{str(error).rstrip('.')} (keys of the queue {name!r}).") from error
            if self.log and queue.size:
                pl_module.log(f"queue/{name}_filled", queue.filled / queue.size, on_step=True, on_epoch=False)


def _refuse_averaged_buffers(trainer: Trainer) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and averaged_model(callback).use_buffers:
            raise UserError(
                f"Expected use_buffers=False of Lightning's {type(callback).__name__} beside a queue, got True, which "
                "would average the queue's rows, ids and pointer: set it, or average a part of the module by "
                "EMACallback."
            )


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _keys_of(outputs: Any, queues: dict[str, FeatureQueue], module: str) -> Mapping[str, Tensor]:
    """Return the keys of a training step's output, after checking that each queue has one."""
    keys = outputs.get("keys") if isinstance(outputs, Mapping) else None
    if not isinstance(keys, Mapping):
        got = f"a dict with {sorted(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise UserError(
            f"Expected {{'loss': ..., 'keys': {{{next(iter(queues))!r}: tensor [B, dim], ...}}}} from training_step of "
            f"{module}, got {got}: return the keys for QueueCallback, detached."
        )
    for name in [*keys, *(outputs.get("key_ids") or {})]:
        if name not in queues:
            raise UserError(
                f"Expected keys of known queues from training_step of {module}, got keys {name!r}: "
                f"{did_you_mean(name, list(queues))}"
            )
    for name in queues:
        if name not in keys:
            raise UserError(
                f"Expected keys for the queue {name!r} from training_step of {module}, got none: "
                f"{did_you_mean(name, list(keys))}"
            )
    return keys
