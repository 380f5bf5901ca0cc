"""Exponential moving averages of modules, for momentum teachers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from ..common.errors import UserError
from ..common.names import did_you_mean
from ..common.ranges import COUNT, SHARE, SettingsGroup
from .modules import find_module, state_key
from .optimizer_step import OptimizerStepCallback

Schedule = Literal["constant", "linear", "cosine"]
Buffers = Literal["copy", "keep", "average"]
Warmup = Literal["never", "always", "short"]

# What wrappers put into parameter names; the averaged copy need not be wrapped alike.
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class EMAPair(SettingsGroup):
    """An online module and its averaged copy: `target = m * target + (1 - m) * source` after each optimizer step.

    Attributes:
        source: Attribute path, from the LightningModule, of the trained module.
        target: Attribute path of the averaged copy (made with `copy.deepcopy`, frozen with `requires_grad_(False)`).
        momentum: Factor m at the first update, in [0, 1].
        final_momentum: Factor at the end of the schedule; only with a schedule other than `constant`.
        schedule: Schedule of m from `momentum` to `final_momentum`: `linear`, or half a `cosine` wave as in BYOL.
        schedule_steps: Optimizer steps until `final_momentum`; None: the length of the run, as the Trainer estimates it
            when training starts.
        buffers: `copy` copies every buffer of the source, of any type; `keep` leaves the target's buffers; `average`
            averages persistent floating-point buffers like parameters, so that statistics of BatchNorm belong to the
            averaged weights, and copies the others.
        warmup: Whether m is at most (1 + n) / (10 + n) after n updates, as in TensorFlow's `ExponentialMovingAverage`
            (`num_updates`), so that the average forgets its initial weights. `short` does so only in runs of fewer
            than 10 / (1 - m) optimizer steps, or of unknown length.

    Raises:
        UserError: If a value is outside its range, or would be ignored in this combination.
    """

    source: str
    target: str
    momentum: Annotated[float, SHARE] = 0.995
    final_momentum: Annotated[float | None, SHARE] = None
    schedule: Schedule = "constant"
    schedule_steps: Annotated[int | None, COUNT] = None
    buffers: Buffers = "copy"
    warmup: Warmup = "never"

    def __post_init__(self) -> None:
        choices_of = {"schedule": get_args(Schedule), "buffers": get_args(Buffers), "warmup": get_args(Warmup)}
        for name, choices in choices_of.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(
                    f"Expected one of {', '.join(choices)} as {name} of an EMAPair, got {value!r}: choose one of them."
                )
        if self.schedule == "constant" and (self.final_momentum is not None or self.schedule_steps is not None):
            raise UserError(
                "Expected neither final_momentum nor schedule_steps in an EMAPair with the constant schedule, got one: "
                "set schedule to linear or cosine, or leave them out."
            )
        if self.schedule != "constant" and self.final_momentum is None:
            raise UserError(
                f"Expected final_momentum in an EMAPair with the {self.schedule} schedule, got none: set it, to 1.0."
            )


def ema_momentum(
    update: int, momentum: float, final_momentum: float | None, schedule: Schedule, schedule_steps: int | None
) -> float:
    """Return the momentum of one update.

    Args:
        update: Number of updates before this one.
        momentum: Value at update 0.
        final_momentum: Value from update `schedule_steps` on; not used by `constant`.
        schedule: `constant`, `linear` or `cosine`.
        schedule_steps: Number of updates from the first value to the last; not used by `constant`.

    Returns:
        The factor of the old average, in [0, 1].
    """
    if schedule == "constant" or final_momentum is None or schedule_steps is None:
        return momentum
    done = min(update / schedule_steps, 1.0)
    if schedule == "cosine":
        done = (1.0 - math.cos(math.pi * done)) / 2.0
    return momentum + (final_momentum - momentum) * done


class EMACallback(OptimizerStepCallback):
    """Keep averaged copies of modules up to date, once per optimizer step that changed the weights.

    The average is a submodule of the LightningModule: it is in every checkpoint, has its own forward pass and is never
    swapped with the online weights. The callback's state is the number of updates of each pair, which decides the
    momentum of its schedule. So a resumed run has exactly the average of the checkpoint. To end like the uninterrupted
    run it also needs the same batches and the same random draws: see `StopOnSignal`.

    Parameters are matched by name when training starts, so that a module that replaces another later is not averaged,
    and updated in place with the fused multi-tensor kernel that torch's own averaging uses; sharded parameters
    (DTensor) are updated shard by shard. An average in 16 bits with a momentum near 1 does not move, since the update
    is below its resolution: keep the target in float32 (the types may differ).

    Args:
        pairs: Pairs by name; None uses the module's `momentum_pairs()`.
        log: Whether to log each pair's momentum as `momentum/<name>` at each update.
    """

    def __init__(self, pairs: dict[str, EMAPair] | None = None, log: bool = True) -> None:
        super().__init__()
        if pairs is not None and not pairs:
            raise UserError(
                "Expected at least one pair for EMACallback, got an empty dict: name one, or give None to ask the "
                "module."
            )
        self.pairs = pairs
        self.log = log
        self.updates: dict[str, int] = {}
        self._steps_of_run: int | None = None
        self._matches: dict[str, _Match] = {}  # by pair, in training
        self._short: set[str] = set()  # pairs that warm up because the run is short

    @property
    @override
    def state_key(self) -> str:
        """Contain the pairs' names, so that several instances have separate states."""
        return state_key(self, pairs=None if self.pairs is None else sorted(self.pairs))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updates": dict(self.updates)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = {str(name): int(count) for name, count in state_dict["updates"].items()}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check every pair before the first batch."""
        pairs = self.pairs_of(pl_module)
        if self.updates and set(self.updates) != set(pairs):
            rank_zero_warn(
                f"The checkpoint counted EMA updates for {sorted(self.updates)}, this run has the pairs "
                f"{sorted(pairs)}: pairs without a count restart their schedule."
            )
        self.updates = {name: self.updates.get(name, 0) for name in pairs}
        for name, pair in pairs.items():
            _matched(name, pair, pl_module)
        self._refuse_shared_targets(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._matches = {name: _matched(name, pair, pl_module) for name, pair in self.pairs_of(pl_module).items()}
        # Not earlier: an estimate before the loaders exist makes Lightning drop their state
        # (Lightning-AI/pytorch-lightning#20550).
        pairs = self.pairs_of(pl_module)
        waiting = [name for name, pair in pairs.items() if pair.schedule != "constant" and pair.schedule_steps is None]
        if waiting:
            steps = trainer.estimated_stepping_batches
            if not math.isfinite(steps) or steps < 1:
                raise UserError(
                    f"Expected a run of known length, with which the momentum schedule of the EMA pair {waiting[0]!r} "
                    "ends, got one of unknown length: set the pair's schedule_steps, or the Trainer's max_steps."
                )
            self._steps_of_run = int(steps)
        self._short = {name for name, pair in pairs.items() if pair.warmup == "short" and _is_short(trainer, pair)}
        for name in sorted(self._short):
            rank_zero_info(
                f"The average {name!r} of momentum {pairs[name].momentum} warms up, since the run is too short for it "
                "to forget its initial weights."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._matches = {}

    @override
    def on_optimizer_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, momentum in self.update(pl_module).items():
            if self.log:
                pl_module.log(f"momentum/{name}", momentum, on_step=True, on_epoch=False)

    @torch.no_grad()
    def update(self, pl_module: LightningModule) -> dict[str, float]:
        """Move every target towards its source once.

        Returns:
            Momentum of the update by name of the pair.

        Raises:
            UserError: If a path does not exist, source and target do not match, or the target is trainable.
        """
        used = {}
        for name, pair in self.pairs_of(pl_module).items():
            count = self.updates.get(name, 0)
            steps = self._steps_of_run if pair.schedule_steps is None else pair.schedule_steps
            momentum = ema_momentum(count, pair.momentum, pair.final_momentum, pair.schedule, steps)
            if pair.warmup == "always" or name in self._short:
                momentum = min(momentum, (1 + count) / (10 + count))
            match = self._matches.get(name) or _matched(name, pair, pl_module)
            for sharded in match.sharded:
                sharded.reshard()
            _lerp(match.averages, match.weights, momentum)
            for buffer, source in match.copies:
                buffer.copy_(source)
            self.updates[name] = count + 1
            used[name] = momentum
        return used

    def pairs_of(self, pl_module: LightningModule) -> dict[str, EMAPair]:
        """Return the pairs of the constructor, else those of the module's `momentum_pairs()`.

        Raises:
            UserError: If there are no pairs.
        """
        if self.pairs is not None:
            return self.pairs
        ask = getattr(pl_module, "momentum_pairs", None)
        pairs: dict[str, EMAPair] = ask() if callable(ask) else {}
        if not pairs:
            raise UserError(
                f"Expected pairs for EMACallback, got none from its arguments and none from momentum_pairs() of "
                f"{type(pl_module).__name__}: pass pairs={{'teacher': EMAPair(source, target)}}, or add the method."
            )
        return pairs

    def _refuse_shared_targets(self, trainer: Trainer, pl_module: LightningModule) -> None:
        owner: dict[int, str] = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(callback, EMACallback):
                continue
            for name, pair in callback.pairs_of(pl_module).items():
                target = find_module(pl_module, pair.target, nn.Module, f"target of the EMA pair {name!r}")
                for parameter in target.parameters():
                    if id(parameter) in owner:
                        raise UserError(
                            f"Expected EMA pairs with different targets, got {owner[id(parameter)]!r} and {name!r}, "
                            f"which update the same parameters of {pair.target!r}: leave one of them out."
                        )
                owner.update({id(parameter): name for parameter in target.parameters()})


def _is_short(trainer: Trainer, pair: EMAPair) -> bool:
    steps = trainer.estimated_stepping_batches
    return not 0 < steps < math.inf or steps * (1 - pair.momentum) < 10


class _Match(NamedTuple):
    """The tensors of a pair."""

    averages: list[Tensor]
    weights: list[Tensor]
    """Of the source, in the order of `averages`."""
    copies: list[tuple[Tensor, Tensor]]
    """Buffers of the target, and those of the source that they copy."""
    sharded: list[FSDPModule]
    """FSDP2 leaves these gathered after a forward pass without gradient: their parameters are plain tensors then."""


def _matched(name: str, pair: EMAPair, pl_module: nn.Module) -> _Match:
    """Match the tensors of the target with those of the source by name."""
    source = find_module(pl_module, pair.source, nn.Module, f"source of the EMA pair {name!r}")
    target = find_module(pl_module, pair.target, nn.Module, f"target of the EMA pair {name!r}")
    sharded = [module for root in (source, target) for module in root.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.reshard()

    averages: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    # Every name is checked, also the second name of a tied parameter, whose tensor is updated only once.
    for label, average, weight in _by_name(
        f"the EMA pair {name!r}, parameter",
        target.named_parameters(remove_duplicate=False),
        source.named_parameters(remove_duplicate=False),
    ):
        if average.requires_grad:
            raise UserError(
                f"Expected a frozen target {pair.target!r} of the EMA pair {name!r}, got a trainable parameter "
                f"{label!r}: call requires_grad_(False) on the target."
            )
        if weights.setdefault(id(average), weight) is not weight:
            raise UserError(
                f"Expected equally tied parameters in the EMA pair {name!r}, got {label!r} tied in the target "
                f"{pair.target!r} but not in the source {pair.source!r}: make the target with copy.deepcopy of the "
                "source."
            )
        averages[id(average)] = average

    buffers: list[tuple[Tensor, Tensor]] = []
    if pair.buffers != "keep":
        named = _by_name(f"the EMA pair {name!r}, buffer", target.named_buffers(), source.named_buffers())
        buffers = [(buffer, of_source) for _, buffer, of_source in named]
    if pair.buffers == "average":
        # Others are constants, such as attention masks, whose infinities have no average.
        kept = {id(tensor) for tensor in target.state_dict(keep_vars=True).values()}
        for buffer, of_source in buffers:
            if buffer.is_floating_point() and id(buffer) in kept:
                averages[id(buffer)], weights[id(buffer)] = buffer, of_source
        buffers = [both for both in buffers if id(both[0]) not in averages]
    return _Match(list(averages.values()), [weights[key] for key in averages], buffers, sharded)


def _by_name(
    what: str, target: Iterable[tuple[str, Tensor]], source: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor of the target, tensor of the source), or raise for the first that differ."""
    targets = _unwrapped(target)
    sources = _unwrapped(source)
    for label in [*targets, *sources]:
        if label not in targets or label not in sources:
            has, lacks = ("target", "source") if label in targets else ("source", "target")
            there = list(sources if label in targets else targets)
            raise UserError(
                f"Expected equal names in {what}s, got {label!r} in the {has} but not in the {lacks} "
                f"({did_you_mean(label, there).rstrip('.')}): make the target with copy.deepcopy of the source."
            )
    for label, tensor in targets.items():
        if tensor.shape != sources[label].shape:
            raise UserError(
                f"Expected equal shapes in {what}s, got {label!r} with {list(tensor.shape)} in the target and "
                f"{list(sources[label].shape)} in the source: make the target with copy.deepcopy of the source."
            )
        yield label, tensor, sources[label]


def _unwrapped(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    tensors = {}
    for label, tensor in named:
        for wrapper in _WRAPPER_NAMES:
            label = label.replace(wrapper, "")
        tensors[label] = tensor
    return tensors


def _lerp(averages: list[Tensor], weights: list[Tensor], momentum: float) -> None:
    """Set each average to `momentum * average + (1 - momentum) * weight`, in place, one kernel per kind of tensor.

    This is the public interface of torch's fused `_foreach_lerp_`, which reads and writes every tensor once and
    allocates nothing; a multiply and an add would read and write the averages twice.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for average, weight in zip(averages, weights, strict=True):
        average, weight = _local(average, weight)
        kind = (average.device, average.dtype)
        averages_of_group, weights_of_group = groups.setdefault(kind, ([], []))
        averages_of_group.append(average)
        weights_of_group.append(weight if (weight.device, weight.dtype) == kind else weight.to(*kind))
    fused = get_ema_multi_avg_fn(momentum)
    for averages_of_group, weights_of_group in groups.values():
        fused(averages_of_group, weights_of_group, 0)


def _local(average: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return this process's part of a sharded pair; plain tensors are returned unchanged."""
    if not isinstance(average, DTensor) and not isinstance(weight, DTensor):
        return average, weight
    if (
        isinstance(average, DTensor)
        and isinstance(weight, DTensor)
        and average.placements == weight.placements
        and average.device_mesh == weight.device_mesh
    ):
        return average.to_local(), weight.to_local()
    raise ValueError(
        "Expected an EMA pair whose source and target are sharded alike, got different placements: call fully_shard on "
        "both in the same way."
    )
