"""Random draws in a training step as a function of counters, and what a run draws on another number of processes."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from ..common.ranges import SEED, CheckedArguments
from . import draws
from .distributed.collectives import world_size
from .modules import accumulates
from .resumed_run import (
    METRICS_KEY,
    refuse_stochastic_weight_averaging,
    report_other_processes,
    saved_metrics,
    stop_again,
    warn_of_plateau,
)
from .stopping import validate_after_resume


class StepSeedCallback(CheckedArguments, Callback):
    """Seed torch (CPU and accelerators), Python's `random` and the draws by sample before every training batch.

    Lightning saves no generator state, so dropout, sampled negatives and masks of a resumed run would differ from those
    of the uninterrupted run. With this callback they depend on counters only: the run's seed and the number of training
    batches since the first one of the run, and further on the rank, or for `callbacks.draws` on the position in the
    global batch; draws in between, as in a validation, do not matter.

    A run that resumes with another number of processes prints what differs from the run of the checkpoint.

    Draws between batches (in epoch hooks, in initialization) and in loader workers are not covered.

    The callback also ensures that a validation is not skipped when a run resumes from a checkpoint that was written at
    the end of the batch before the validation, and warns if a checkpoint would hold a part of a step: a checkpoint of a
    validation between two accumulated batches. Metrics are in the checkpoint, so that callbacks that monitor one decide
    in a resumed run as in the uninterrupted run; a run that `EarlyStopping` had ended stays ended.

    Args:
        seed: Seed of the run; None takes the seed of `seed_everything` (the environment variable PL_GLOBAL_SEED), or
            0. A checkpoint's seed overrides both, with a warning, since a resumed run must repeat its draws.
    """

    def __init__(self, seed: Annotated[int | None, SEED] = None) -> None:
        super().__init__()
        self._seed = seed
        self._told = False
        self._processes: int | None = None  # of the checkpoint
        self._metrics: dict[str, Tensor] = {}  # of the checkpoint

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "processes": world_size()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        seed = int(state_dict["seed"])
        if seed != self.seed:
            rank_zero_warn(
                f"The run in the checkpoint was started with seed {seed}, this one with {self.seed}: using "
                f"{seed}, so that the resumed run repeats the draws of the uninterrupted run."
            )
        self._seed = seed
        self._processes = state_dict["processes"]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed = self.seed  # fixed from here on, even if the environment changes

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callback_metrics.update(self._metrics)  # not earlier: the sanity check resets them
        self._metrics = {}
        before = self._processes
        self._processes = None
        if before is not None:
            warn_of_plateau(trainer)
        if before not in (None, trainer.world_size):
            report_other_processes(trainer, pl_module, before)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # `total` counts over epochs and resumed runs, and already includes this batch.
        counted = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        seed = step_seed(self.seed, counted - 1, trainer.global_rank)
        torch.manual_seed(seed)
        random.seed(seed)
        draws.begin_step(step_seed(self.seed, counted - 1))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        draws.begin_step(None)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        draws.begin_step(None)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if training and accumulates(trainer) and not self._told:
            self._told = True
            batches = trainer.accumulate_grad_batches
            rank_zero_warn(
                f"This validation is between two of the {batches} accumulated batches of a step, whose gradients are "
                "in no checkpoint: a run that resumes from a checkpoint of now differs from this run; set "
                f"trainer.val_check_interval to a multiple of {batches} batches."
            )

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        validate_after_resume(trainer, checkpoint)
        checkpoint[METRICS_KEY] = saved_metrics(trainer)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            refuse_stochastic_weight_averaging(checkpoint)
            self._metrics = checkpoint.get(METRICS_KEY, {})  # none if the run had no such callback
            stop_again(trainer, checkpoint)


def step_seed(seed: int, batch: int, rank: int | None = None) -> int:
    """Return a generator seed for one batch: a 63-bit hash, so that neighboring seeds are unrelated.

    Args:
        seed: The run's seed.
        batch: Number of training batches before this one, over all epochs.
        rank: Index of the process; None for a seed of all processes together.
    """
    digest = hashlib.blake2b(f"{seed}/{batch}/{'all' if rank is None else rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
