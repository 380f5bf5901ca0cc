"""Logging of values that are the same in every process."""

from collections.abc import Mapping

from lightning import LightningModule
from torch import Tensor


def log_global(module: LightningModule, values: Mapping[str, Tensor | float], progress_bar: str | None = None) -> None:
    """Log values that are the same in every process, from a hook at the end of an epoch.

    Args:
        module: what logs.
        values: by name.
        progress_bar: name of the value that the progress bar shows.
    """
    for name, value in values.items():
        # The mean of equal values; without `sync_dist` Lightning warns.
        module.log(name, value, prog_bar=name == progress_bar, sync_dist=True)
