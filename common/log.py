"""Logging of values that are the same in every process."""

from collections.abc import Mapping

from lightning import LightningModule
from torch import Tensor


def log_global(module: LightningModule, values: Mapping[str, Tensor | float], progress_bar: str | None = None) -> None:
    """Log values that are the same in every process, from a hook at the end of an epoch."""
    for name, value in values.items():
        # `sync_dist` averages equal values; without it Lightning warns.
        module.log(name, value, prog_bar=name == progress_bar, sync_dist=True)
