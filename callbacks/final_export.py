"""Export of the trained model when a run ends."""

import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ..common.errors import UserError
from .checkpoints.checkpoint_io import check_free_among


class FinalExport(Callback):
    """Call the module's `export(folder, **options)` when a fit is complete.

    A fit that was stopped is not exported: it can be resumed, or its checkpoint exported with `vlightning export`.

    Args:
        folder: New folder of the export; by default `export` in the run's folder.
        options: Further arguments of the module's method.
    """

    def __init__(self, folder: str | None = None, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.options = dict(options or {})

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the module has the method and the folder is free.

        Raises:
            UserError: If the module has no method `export` that takes the options, or the folder exists and is not
                empty.
        """
        if stage != "fit":
            return
        if not callable(getattr(pl_module, "export", None)):
            raise UserError(
                f"Expected a module with a method export(folder) for FinalExport, got {type(pl_module).__name__}: add "
                "the method, or leave the callback out."
            )
        try:
            inspect.signature(pl_module.export).bind("", **self.options)  # type: ignore[arg-type]
        except TypeError as error:
            raise UserError(
                f"Expected options of FinalExport that {type(pl_module).__name__}.export takes after the folder, got "
                f"{self.options or 'none'} ({error}): correct them."
            ) from error
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_free_among(trainer.strategy, self._target(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.interrupted or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = self._target(trainer)
        pl_module.export(folder, **self.options)  # type: ignore[operator]
        rank_zero_info(f"The trained model was exported to {folder}.")

    def _target(self, trainer: Trainer) -> Path:
        """Return the folder; every process must call this."""
        home = trainer.log_dir or trainer.default_root_dir
        return Path(self.folder).expanduser() if self.folder is not None else Path(home) / "export"
