"""AdamW with a warm-up that fits into the run, and half a cosine after it, as open_clip trains."""

from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ..base.checkpoints import CheckpointModule
from .clipping import ClippedFusedGradients
from .groups import weight_decay_groups
from .layout import lay_out_moments
from .schedules import capped_warmup_cosine, steps_of_run, warmup_cosine, warn_of_capped_warmup


def adamw(
    groups: list[dict[str, Any]],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
) -> AdamW:
    """Return a fused AdamW whose moments lie in memory as their weights do.

    Args:
        groups: parameter groups; the weight decay of one that names none is `weight_decay`.
        learning_rate: learning rate at its peak.
        weight_decay: weight decay of the groups that name none.
        betas: beta1 and beta2.
        eps: epsilon.
    """
    optimizer = AdamW(groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    lay_out_moments(optimizer)
    return optimizer


class AdamWModule(ClippedFusedGradients, CheckpointModule):
    """A LightningModule with this optimizer and schedule.

    A subclass saves the hyperparameters `learning_rate`, `warmup_steps`, `weight_decay`, `betas` and `eps`, and
    `min_learning_rate` where the cosine does not end at 0; it calls `super()` where it overrides a hook.
    """

    def on_train_start(self) -> None:
        """Say where the warm-up had to be cut, and begin with the rate that the run's length gives the first step.

        Raises:
            ValueError: if the length is not known.
        """
        total = steps_of_run(self.trainer)
        self.warn_of_schedule(total)
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if isinstance(scheduler, LambdaLR) and scheduler.last_epoch == 0:  # else it was restored
                factor = self.lr_of_run(0, total) / self.hparams["learning_rate"]
                for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                    group["lr"] = base * factor

    def warn_of_schedule(self, total: int) -> None:
        """Say where the warm-up had to be cut in a run of so many steps."""
        warn_of_capped_warmup(self.hparams["warmup_steps"], total)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, fused, with the schedule moved once per optimizer step."""
        rates = {name: self.hparams[name] for name in ("betas", "eps")}
        optimizer = AdamW(self.parameter_groups(), lr=self.hparams["learning_rate"], fused=True, **rates)
        lay_out_moments(optimizer)
        # A factor of the peak, so that changing the peak on resume takes effect.
        schedule = LambdaLR(optimizer, lambda step: self.scheduled_lr(step) / self.hparams["learning_rate"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What trains, in groups: matrices decay, vectors do not."""
        return weight_decay_groups(self, self.hparams["weight_decay"], spare=self.decay_spared())

    def decay_spared(self) -> tuple[str, ...]:
        """Names of matrices that do not decay."""
        return ()

    def scheduled_lr(self, step: int) -> float:
        """Learning rate at an optimizer step."""
        if step == 0:  # the length of the run would build the loaders before a checkpoint is restored
            # Until `on_train_start`, which knows the length.
            return float(self.hparams["learning_rate"] / max(self.hparams["warmup_steps"], 1))
        return self.lr_of_run(step, steps_of_run(self.trainer))

    def lr_of_run(self, step: int, total: int) -> float:
        """Learning rate at a step of a run of so many: linear warm-up, then half a cosine to 0 or the floor."""
        peak, floor = self.hparams["learning_rate"], self.hparams.get("min_learning_rate", 0.0)
        return capped_warmup_cosine(step, total, peak, self.hparams["warmup_steps"], floor)


class WarmupShareModule(AdamWModule):
    """The same with a warm-up from 0 over a share of the run, the hyperparameter `warmup_share`, then a cosine to 0."""

    def warn_of_schedule(self, total: int) -> None:
        """Say nothing: such a warm-up fits."""

    def scheduled_lr(self, step: int) -> float:
        """Learning rate at an optimizer step; the first one's is 0, unless there is no warm-up."""
        if step == 0:  # as above
            return 0.0 if self.hparams["warmup_share"] else float(self.hparams["learning_rate"])
        return self.lr_of_run(step, steps_of_run(self.trainer))

    def lr_of_run(self, step: int, total: int) -> float:
        """Learning rate at a step of a run of so many."""
        warmup = int(self.hparams["warmup_share"] * total)
        return warmup_cosine(step, total, self.hparams["learning_rate"], 0.0, warmup, 0.0)
