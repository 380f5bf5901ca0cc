"""What a run does differently that goes on with another number of processes."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from .private_api import is_batch_norm

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def report_other_processes(trainer: Trainer, module: LightningModule, before: int) -> None:
    """Say in one line what differs from the run of a checkpoint with another number of processes.

    Beside what networks contain, the module and the datamodule tell what differs by a method `by_process()`, which
    returns clauses.

    Args:
        trainer: trainer of the run.
        module: module of the run.
        before: number of processes of the run that wrote the checkpoint.
    """
    found = by_process(module)
    for part in (module, getattr(trainer, "datamodule", None)):
        tell: Any = getattr(part, "by_process", None)
        found += [] if tell is None else tell()
    now = f"{before} processes before, {trainer.world_size} now"
    if found:
        rank_zero_warn(f"{now}: the run goes on, but not exactly, because {'; '.join(found)}.")
    else:
        rank_zero_info(f"{now}: the run goes on with the same batches and draws.")


def by_process(module: nn.Module) -> list[str]:
    """Return in clauses what the networks of a module compute or draw by process."""
    trained = [part for part in module.modules() if part.training]
    found = []
    if any((isinstance(part, _DROPOUT) and part.p > 0) or _drops_paths(part) for part in trained):
        found.append("dropout is drawn by rank")
    if any(is_batch_norm(part) and not isinstance(part, nn.SyncBatchNorm) for part in trained):
        found.append("BatchNorm takes its statistics from the batch of each process")
    return found


def _drops_paths(part: nn.Module) -> bool:
    share = getattr(part, "drop_prob", 0.0)  # stochastic depth, as timm names it
    return isinstance(share, float) and share > 0
