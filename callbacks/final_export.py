"""Export of the trained model when a run ends."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ..common.errors import UserError
from .checkpoints.checkpoint_io import check_free_among


class FinalExport(Callback):
    """Call the module's `export(folder)`, or `export(folder, layout)`, when a fit is complete.

    A fit that was stopped is not exported: it can be resumed, or its checkpoint exported with `vlightning export`.

    Args:
        folder: New folder of the export; by default `export` in the run's folder.
        layout: Layout of the export, one of the module's `layouts()` if it has this method; by default the method's.
    """

    def __init__(self, folder: str | None = None, layout: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.layout = layout

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the module has the method and the folder is free.

        Raises:
            UserError: If the module has no method `export` or no such layout, or the folder exists and is not empty.
        """
        if stage != "fit":
            return
        if not callable(getattr(pl_module, "export", None)):
            raise UserError(
                f"Expected a module with a method export(folder) for FinalExport, got {type(pl_module).__name__}: add "
                "the method, or leave the callback out."
            )
        layouts: Any = getattr(pl_module, "layouts", None)
        if self.layout is not None and layouts is not None and self.layout not in layouts():
            raise UserError(
                f"Expected {' or '.join(layouts())} as layout of FinalExport, got {self.layout!r}: correct it."
            )
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_free_among(trainer.strategy, self._target(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.interrupted or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = self._target(trainer)
        module: Any = pl_module
        if self.layout is None:
            module.export(folder)
        else:
            module.export(folder, self.layout)
        rank_zero_info(f"The trained model was exported to {folder}.")

    def _target(self, trainer: Trainer) -> Path:
        """Return the folder; every process must call this."""
        home = trainer.log_dir or trainer.default_root_dir
        return Path(self.folder).expanduser() if self.folder is not None else Path(home) / "export"
