"""What every run gets unless the user says otherwise: progress bar, learning rates, checkpoints, safe writing."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

from ..callbacks import AtomicCheckpointIO, SkipNonFiniteSteps, StopOnSignal
from ..common.names import did_you_mean
from .command_line import Typed, UsageError
from .progress import OneLineProgressBar

TRAINER_DEFAULTS: dict[str, Any] = {
    # Short runs should show something too; the cost of a scalar every ten steps is nothing.
    "log_every_n_steps": 10,
    "logger": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "runs", "name": "vlightning"}},
}


def with_defaults(config: dict[str, Any], checkpoints: Sequence[Callback]) -> tuple[dict[str, Any], list[Callback]]:
    """Complete the Trainer's arguments; the user's own always stay, and a default of the same kind then steps back.

    Args:
        config: Arguments of the Trainer, classes built.
        checkpoints: The default checkpoint callbacks.

    Returns:
        The arguments with plugins, and the callbacks to add to the user's.

    Raises:
        UsageError: For FSDP1, which runs on CUDA only and wraps the module as a whole.
    """
    check_strategy(config.get("strategy"))
    own = _as_list(config.get("callbacks"))
    extra: list[Callback] = []
    if config.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in own):
        extra.append(OneLineProgressBar())
    logs = config.get("logger") not in (False, None, []) and not config.get("fast_dev_run")
    if logs and not any(isinstance(c, LearningRateMonitor) for c in own):
        extra.append(LearningRateMonitor(logging_interval="step"))
    if not any(isinstance(c, SkipNonFiniteSteps) for c in own):
        extra.append(SkipNonFiniteSteps())
    if config.get("enable_checkpointing") is not False:
        if not any(isinstance(c, StopOnSignal) for c in own):
            extra.append(StopOnSignal())
        extra += [c for c in checkpoints if not isinstance(c, ModelCheckpoint) or c.save_top_k != 0]
    plugins = _as_list(config.get("plugins"))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return {**config, "callbacks": own, "plugins": plugins}, extra


def leave_out_hp_metric(config: Any, typed: Typed) -> None:
    """Keep TensorBoardLogger from writing `hp_metric`, always -1, unless that was typed.

    Args:
        config: The parsed configuration of the subcommand; the loggers' arguments are changed in place.
        typed: What was typed.
    """
    for logger in _as_list(config.trainer.get("logger")):
        name = str(logger.get("class_path", "")) if hasattr(logger, "get") else ""
        if name.rpartition(".")[2] == "TensorBoardLogger" and not _says(typed, "default_hp_metric"):
            logger.init_args["default_hp_metric"] = False


def check_strategy(strategy: Any) -> None:
    """Refuse FSDP1, as a string or a class, and names that Lightning does not know.

    Args:
        strategy: The Trainer's `strategy` argument, before or after its class was built.

    Raises:
        UsageError: If it cannot be used.
    """
    name = strategy.get("class_path", "") if hasattr(strategy, "get") else strategy
    if isinstance(strategy, FSDPStrategy) or (
        isinstance(name, str) and name.rpartition(".")[2].lower().startswith("fsdp")
    ):
        raise UsageError(
            "trainer.strategy is FSDP1 (FSDPStrategy), which this project does not support: it needs CUDA and wraps "
            "the module as a whole; use FSDP2 with --config configs/strategy/fsdp.yaml (ModelParallelStrategy)."
        )
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in known:
        raise UsageError(f"There is no strategy {strategy!r}; {did_you_mean(strategy, known)}")


def _says(typed: Typed, name: str) -> bool:
    """Whether an argument of a logger was typed, of the only one or of one in a list."""
    loggers = typed.lookup("trainer.logger")
    listed = any(name in (one.get("init_args") or {}) for one in _as_list(loggers) if isinstance(one, dict))
    return listed or typed.is_given(f"trainer.logger.init_args.{name}")


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
