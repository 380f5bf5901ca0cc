"""Validation before the first step, and what the training changed."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from ..common.messages import say


class StartingPoint(Callback):
    """Validate before the first step of a fit, log the results at step 0, and print at the end what changed.

    For fine-tuning, where the model that a run begins with is the one to beat. Not in the sanity check, whose results
    are not logged; `trainer.num_sanity_val_steps: 0` avoids doing a part twice. The results are in the checkpoint, so
    that a resumed run prints them too.

    Args:
        prefix: beginning of the names of the printed metrics.
    """

    def __init__(self, prefix: str = "val/") -> None:
        self.prefix = prefix
        self.before: dict[str, float] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tries = getattr(trainer, "fast_dev_run", False)
        if self.before or trainer.global_step or not trainer.enable_validation or tries:
            return
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        trainer.validating = True
        loop.run()
        trainer.training = True
        self.before = self._metrics(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        after = self._metrics(trainer)
        names = [name for name in self.before if name in after]
        if not names:
            if not getattr(trainer, "fast_dev_run", False):
                rank_zero_warn(
                    f"StartingPoint compares nothing: no validation of this run logs a metric that begins with "
                    f"{self.prefix!r}; log one, set prefix, or leave the callback out."
                )
            return
        width = max(map(len, names))
        say(f"{'':<{width}}  {'before':>8}  {'after':>8}  {'change':>8}")
        for name in names:
            first = self.before[name]
            last = after[name]
            say(f"{name:<{width}}  {first:>8.4g}  {last:>8.4g}  {last - first:>+8.3g}")

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        return {name: value for name, value in sorted(metrics.items()) if name.startswith(self.prefix)}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"before": dict(self.before)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = dict(state_dict["before"])
