"""Every private name of Lightning and torch that callbacks and strategies use.

Each is used here once, with the reason why no public name is sufficient. Checked with Lightning 2.6.6.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A context that sees each operation: torch documents the class, in a module with a private name."""


def accumulates(trainer: Trainer) -> bool:
    """Return whether the current batch only accumulates gradients; Lightning has no public name for it."""
    return bool(trainer.fit_loop._should_accumulate())


def restore_callback_metrics(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Add metrics to those that callbacks see, of which Lightning has a public name for reading only."""
    trainer._logger_connector._callback_metrics.update(metrics)


def validates_next(trainer: Trainer) -> bool:
    """Return whether a validation follows the current batch: Lightning's decision depends on six settings."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return trainer.enable_validation and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def ends_epoch_unvalidated(trainer: Trainer) -> bool:
    """Return whether the current batch is the last of its epoch and no validation follows: private, like the above."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached() and not validates_next(trainer)


def logged_step(trainer: Trainer) -> int | None:
    """Return the step under which the current training batch is logged, None if it is not: both are kept privately."""
    loop = trainer.fit_loop.epoch_loop
    return loop._batches_that_stepped if trainer._logger_connector.should_update_logs else None


def state_key(callback: Callback, **settings: Any) -> str:
    """Return the key of a callback's state with settings in it; Lightning documents the method under this name."""
    return callback._generate_state_key(**settings)


def averages_buffers(callback: WeightAveraging) -> bool:
    """Return whether Lightning's weight averaging also averages buffers; the argument is kept privately."""
    return callback._use_buffers


def averaged_module(callback: WeightAveraging) -> nn.Module:
    """Return the copy of the module that Lightning's weight averaging keeps, privately, from its `setup` on."""
    copy: nn.Module = callback._average_model.module  # type: ignore[union-attr]
    return copy


def loss_scale(scaler: Any) -> Tensor:
    """Return the scale of a `GradScaler` on its device: `get_scale` makes the host wait for it."""
    scale: Tensor = scaler._get_scale_async()
    return scale


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module has running statistics: BatchNorm of any kind has no public common class."""
    return isinstance(module, _NormBase)


def ignored_by_ddp(module: nn.Module) -> Sequence[str]:
    """Return the names that DDP does not broadcast; DDP reads this attribute."""
    names: Sequence[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def ignore_in_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Exclude further names from DDP's broadcast; its documentation names this method, with the underscore."""
    kept = sorted({*ignored_by_ddp(module), *names})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, kept)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors in one kernel; torch has no public name for operations on lists of tensors."""
    torch._foreach_copy_(targets, sources)


def largest_values(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the largest absolute value of each tensor in one kernel, for the same reason."""
    return torch._foreach_norm(tensors, torch.inf)


def is_compiled(module: LightningModule) -> bool:
    """Return whether `torch.compile` compiles a module or a part of it: torch marks compiled modules privately."""
    if module._compiler_ctx is not None:  # the whole module was given to `torch.compile`
        return True
    return any(
        submodule._compiled_call_impl is not None or hasattr(submodule, "_orig_mod") for submodule in module.modules()
    )
