"""Random draws in a training step as a function of (seed, batch, rank)."""

import hashlib
import os
import random
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from .private_api import accumulates
from .stopping import validate_after_resume


class StepSeedCallback(Callback):
    """Seed torch (CPU and accelerators) and Python's `random` before every training batch.

    Lightning saves no generator state, so dropout, sampled negatives and masks of a resumed run would differ from those
    of the uninterrupted run. With this callback they depend on counters only: the run's seed, the number of training
    batches since the first one of the run, and the rank; draws in between, as in a validation, do not matter.

    Draws between batches (in epoch hooks, in initialization) and in loader workers are not covered.

    The callback also ensures that a validation is not skipped when a run resumes from a checkpoint that was written at
    the end of the batch before the validation, and warns if a checkpoint would hold a part of a step: a checkpoint of a
    validation between two accumulated batches.

    Args:
        seed: Seed of the run; None takes the seed of `seed_everything` (the environment variable PL_GLOBAL_SEED), or
            0. A checkpoint's seed overrides both, with a warning, since a resumed run must repeat its draws.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._seed = seed
        self._told = False

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        seed = int(state_dict["seed"])
        if seed != self.seed:
            rank_zero_warn(
                f"The run in the checkpoint was started with seed {seed}, this one with {self.seed}: using "
                f"{seed}, so that the resumed run repeats the draws of the uninterrupted run."
            )
        self._seed = seed

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed = self.seed  # fixed from here on, even if the environment changes

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # `total` counts over epochs and resumed runs, and already includes this batch.
        counted = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        seed = step_seed(self.seed, counted - 1, trainer.global_rank)
        torch.manual_seed(seed)
        random.seed(seed)

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


def step_seed(seed: int, batch: int, rank: int) -> int:
    """Return a generator seed for one batch on one process: a 63-bit hash, so that neighboring seeds are unrelated.

    Args:
        seed: The run's seed.
        batch: Number of training batches before this one, over all epochs.
        rank: Index of the process.
    """
    digest = hashlib.blake2b(f"{seed}/{batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
