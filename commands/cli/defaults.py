"""Defaults of every run: progress, learning rates, speed, checkpoints, atomic writing."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar, ThroughputMonitor
from lightning.pytorch.plugins import CheckpointIO

from ...callbacks import AtomicCheckpointIO, SkipNonFiniteSteps, SpeedMonitor, StarvedStepWarning, StopOnSignal
from ...callbacks.progress_bar import progress_of_output
from .run_report import RunReport

TRAINER_DEFAULTS: dict[str, Any] = {
    # Lightning's default of 50 leaves short runs without logged values.
    "log_every_n_steps": 10,
    "logger": {
        "class_path": "TensorBoardLogger",
        # Lightning's default_hp_metric is a scalar that is always -1.
        "init_args": {"save_dir": "runs", "name": "vlightning", "default_hp_metric": False},
    },
}


def with_defaults(config: dict[str, Any], checkpoints: Sequence[Callback]) -> tuple[dict[str, Any], list[Callback]]:
    """Return the completed arguments of the Trainer, and the callbacks to add to those of the user.

    A default callback is omitted if the user has one of the same kind.
    """
    callbacks = _as_list(config.get("callbacks"))
    checkpointing = config.get("enable_checkpointing") is not False
    logs = config.get("logger") not in (False, None, []) and not config.get("fast_dev_run")
    defaults: list[tuple[bool, Any, Callable[[], Callback]]] = [
        (config.get("enable_progress_bar") is not False, ProgressBar, progress_of_output),
        (logs, LearningRateMonitor, lambda: LearningRateMonitor(logging_interval="step")),
        (logs, (SpeedMonitor, ThroughputMonitor), SpeedMonitor),
        (True, StarvedStepWarning, StarvedStepWarning),
        (True, SkipNonFiniteSteps, SkipNonFiniteSteps),
        (checkpointing, StopOnSignal, StopOnSignal),
        (True, RunReport, RunReport),
    ]
    missing = [
        make for wanted, kind, make in defaults if wanted and not any(isinstance(each, kind) for each in callbacks)
    ]
    extra = [make() for make in missing]
    if checkpointing:
        extra += [each for each in checkpoints if not isinstance(each, ModelCheckpoint) or each.save_top_k != 0]
    plugins = _as_list(config.get("plugins"))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return {**config, "callbacks": callbacks, "plugins": plugins}, extra


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
