"""Differences between a resumed run and the uninterrupted one, and what Lightning's callbacks need to resume."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from ..common.errors import UserError
from .modules import is_batch_norm

METRICS_KEY = "callback_metrics"
"""Entry of a checkpoint with the metrics that callbacks see, 0-dimensional tensors by name."""


def saved_metrics(trainer: Trainer) -> dict[str, Tensor]:
    """Return what callbacks see of the metrics, for a checkpoint.

    Lightning (2.6.6) saves none: a run that resumes from a checkpoint of the end of a validation runs the hooks of the
    epoch's end without them, so that `EarlyStopping` raises an error and `ModelCheckpoint` keeps no best checkpoint.
    """
    return {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}


def stop_again(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Stop a run that `EarlyStopping` has already ended, unless its given patience is larger now.

    Lightning (2.6.6) trains on when it resumes from the last checkpoint of such a run, and uses the patience of the
    checkpoint. For `on_load_checkpoint` of a callback, which comes before the states of all callbacks are restored.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = checkpoint["callbacks"].get(callback.state_key) if isinstance(callback, EarlyStopping) else None
        if state is None:
            continue
        before = state["patience"]
        state["patience"] = callback.patience
        exhausted = state["stopping_reason"] == EarlyStoppingReason.PATIENCE_EXHAUSTED.value
        if exhausted and callback.patience > before and state["wait_count"] < callback.patience:
            state |= {"stopping_reason": EarlyStoppingReason.NOT_STOPPED.value, "stopping_reason_message": None}
        elif state["stopping_reason_message"] is not None:  # kept by Lightning from the decision to stop on
            trainer.should_stop = True
            rank_zero_info(
                f"EarlyStopping had ended the run of the checkpoint by {callback.monitor}: a larger patience trains on."
            )


def warn_of_plateau(trainer: Trainer) -> None:
    """Warn that a resumed run with `ReduceLROnPlateau` is not exact: Lightning (2.6.6) omits an update of it."""
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        rank_zero_warn(
            "The run goes on, but not exactly: Lightning does not update ReduceLROnPlateau at the end of the epoch in "
            "which a run resumes."
        )


def refuse_stochastic_weight_averaging(checkpoint: dict[str, Any]) -> None:
    """Refuse to resume a run with `StochasticWeightAveraging`.

    Lightning (2.6.6) restores neither the schedule that the callback replaces nor the pass over the data with which it
    ends, so the resumed run would differ.

    Raises:
        UserError: If the checkpoint is of such a run.
    """
    if StochasticWeightAveraging.__qualname__ in checkpoint["callbacks"]:
        raise UserError(
            "Expected a run that can resume, got the checkpoint of one with StochasticWeightAveraging, whose schedule "
            "Lightning does not restore: start anew, with EMAWeightAveraging if the run may be stopped."
        )


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def report_other_processes(trainer: Trainer, module: LightningModule, processes_before: int) -> None:
    """Log in one line what differs from the run of a checkpoint with another number of processes.

    Differences are those of the networks' layers, and the clauses that a method `by_process()` of the module or of the
    datamodule returns.
    """
    clauses = by_process(module)
    for component in (module, getattr(trainer, "datamodule", None)):
        clauses_of: Any = getattr(component, "by_process", None)
        clauses += [] if clauses_of is None else clauses_of()
    now = f"{processes_before} processes before, {trainer.world_size} now"
    if clauses:
        rank_zero_warn(f"{now}: the run goes on, but not exactly, because {'; '.join(clauses)}.")
    else:
        rank_zero_info(f"{now}: the run goes on with the same batches and draws.")


def by_process(module: nn.Module) -> list[str]:
    """Return clauses that name what the layers of a module compute or draw by process."""
    trained = [submodule for submodule in module.modules() if submodule.training]
    clauses = []
    if any((isinstance(submodule, _DROPOUT) and submodule.p > 0) or _drops_paths(submodule) for submodule in trained):
        clauses.append("dropout is drawn by rank")
    if any(is_batch_norm(submodule) and not isinstance(submodule, nn.SyncBatchNorm) for submodule in trained):
        clauses.append("BatchNorm takes its statistics from the batch of each process")
    return clauses


def _drops_paths(submodule: nn.Module) -> bool:
    share = getattr(submodule, "drop_prob", 0.0)  # stochastic depth, as timm names it
    return isinstance(share, float) and share > 0
