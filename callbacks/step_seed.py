"""Random draws inside a training step as a function of (seed, batch, rank)."""

import hashlib
import os
import random
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from .stopping import validate_after_resume


class StepSeedCallback(Callback):
    """Seeds torch (CPU and accelerators) and Python's `random` before every training batch.

    Lightning saves no generator state, so dropout, sampled negatives and masks of a resumed run differ from those of
    the run that was never stopped. Here they depend on counters only: the run's seed, the number of training batches
    since its very first one, and the rank. It does not matter what was drawn in between, for instance by validation.

    Draws between batches (in epoch hooks, in initialisation) are not covered, nor are those of loader workers.

    It also sees to it that a validation is not left out when a run goes on from a checkpoint that was written when the
    batch before it ended, and warns where checkpoints would hold a part of a step: those of a validation between two
    accumulated batches.

    Args:
        seed: Seed of the run; None takes the one of `seed_everything` (the environment variable PL_GLOBAL_SEED), else
            0. A checkpoint's seed wins over both, with a warning, since a resumed run must repeat its draws.
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
                f"The run in the checkpoint was started with seed {seed}, this one with {self.seed}: going on with "
                f"{seed}, so that the resumed run repeats the draws of the run that was never stopped."
            )
        self._seed = seed

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed = self.seed  # from here on, whatever happens to the environment

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # `total` counts over epochs and resumes, and it was already raised for this batch.
        counted = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        seed = step_seed(self.seed, counted - 1, trainer.global_rank)
        torch.manual_seed(seed)
        random.seed(seed)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if training and trainer.fit_loop._should_accumulate() and not self._told:
            self._told = True
            batches = trainer.accumulate_grad_batches
            rank_zero_warn(
                f"This validation is between two of the {batches} accumulated batches of a step, whose gradients are "
                "in no checkpoint: a run that goes on from one that is written now is not exactly this one; give a "
                f"trainer.val_check_interval that is a multiple of {batches} batches."
            )

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        validate_after_resume(trainer, checkpoint)


def step_seed(seed: int, batch: int, rank: int) -> int:
    """Returns a generator seed for one batch on one process: a 63-bit hash, so that neighbours are unrelated.

    Args:
        seed: The run's seed.
        batch: Number of training batches before this one, over all epochs.
        rank: Index of the process.
    """
    digest = hashlib.blake2b(f"{seed}/{batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
