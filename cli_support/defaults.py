"""Defaults of every run: progress bar, learning rates, checkpoints, atomic writing."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

from ..callbacks import AtomicCheckpointIO, SkipNonFiniteSteps, StopOnSignal
from ..callbacks.progress_bar import OneLineProgressBar
from ..common.names import did_you_mean
from .command_line import Typed, UsageError

TRAINER_DEFAULTS: dict[str, Any] = {
    # Short runs should show something too; a scalar every ten steps costs nothing.
    "log_every_n_steps": 10,
    "logger": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "runs", "name": "vlightning"}},
}


def with_defaults(config: dict[str, Any], checkpoints: Sequence[Callback]) -> tuple[dict[str, Any], list[Callback]]:
    """Complete the Trainer's arguments; a default is left out where the user has a callback of its kind.

    Args:
        config: Arguments of the Trainer, classes built.
        checkpoints: The default checkpoint callbacks.

    Returns:
        The arguments with plugins, and the callbacks to add to the user's.
    """
    check_strategy(config.get("strategy"))
    own = _as_list(config.get("callbacks"))
    checkpointing = config.get("enable_checkpointing") is not False
    logs = config.get("logger") not in (False, None, []) and not config.get("fast_dev_run")
    defaults = [
        (config.get("enable_progress_bar") is not False, ProgressBar, OneLineProgressBar),
        (logs, LearningRateMonitor, lambda: LearningRateMonitor(logging_interval="step")),
        (True, SkipNonFiniteSteps, SkipNonFiniteSteps),
        (checkpointing, StopOnSignal, StopOnSignal),
    ]
    extra = [make() for wanted, kind, make in defaults if wanted and not any(isinstance(each, kind) for each in own)]
    if checkpointing:
        extra += [each for each in checkpoints if not isinstance(each, ModelCheckpoint) or each.save_top_k != 0]
    plugins = _as_list(config.get("plugins"))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return {**config, "callbacks": own, "plugins": plugins}, extra


def leave_out_hp_metric(config: Any, typed: Typed) -> None:
    """Keep TensorBoardLogger from writing `hp_metric`, always -1, unless that was typed; changes the configuration."""
    given = [one.get("init_args") or {} for one in _as_list(typed.lookup("trainer.logger")) if isinstance(one, dict)]
    if typed.is_given("trainer.logger.init_args.default_hp_metric") or any("default_hp_metric" in one for one in given):
        return
    for logger in _as_list(config.trainer.get("logger")):
        if hasattr(logger, "get") and str(logger.get("class_path")).endswith("TensorBoardLogger"):
            logger.init_args["default_hp_metric"] = False


def check_strategy(strategy: Any) -> None:
    """Check the Trainer's `strategy` argument, before or after its class was built.

    Raises:
        UsageError: For FSDP1, which runs on CUDA only and wraps the module as a whole, and for an unknown name.
    """
    name = str(strategy.get("class_path", "") if hasattr(strategy, "get") else strategy)
    if isinstance(strategy, FSDPStrategy) or name.rpartition(".")[2].lower().startswith("fsdp"):
        raise UsageError(
            "trainer.strategy is FSDP1 (FSDPStrategy), which this project does not support: it needs CUDA and wraps "
            "the module as a whole; use FSDP2 with --config configs/strategy/fsdp.yaml (ModelParallelStrategy)."
        )
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in known:
        raise UsageError(f"There is no strategy {strategy!r}; {did_you_mean(strategy, known)}")


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
