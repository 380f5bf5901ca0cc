"""The learngene of a CLIP, written to a file when its extraction ends."""

import dataclasses
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ..common.errors import UserError
from .checkpoints.checkpoint_io import check_free_among
from .learngene.file import FILE_NAME, Learngene, Storage, save_learngene


class LearngeneWriter(Callback):
    """Write the learngene of a module to a file when a fit ends.

    An interrupted fit writes nothing: it is resumed from its checkpoint. The module's method `learngene() -> Learngene`
    gives the tensors; every rank calls it. The callback adds the training data and the number of steps.

    Args:
        file: path of the file, by default `learngene.safetensors` in the run's folder. It must not exist.
        storage: "float16" halves the file.
    """

    def __init__(self, file: str | None = None, storage: Storage = "float32") -> None:
        super().__init__()
        self.file = file
        self.storage: Storage = storage

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the module has a learngene and that the file does not exist.

        Raises:
            UserError: If the module has no learngene, or the file exists.
        """
        if stage != "fit":
            return
        if not callable(getattr(pl_module, "learngene", None)):
            raise UserError(
                f"Expected a module with a method learngene() for LearngeneWriter, got {type(pl_module).__name__}: "
                "train a module that extracts a learngene, such as MMLGModule, or remove the callback."
            )
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_free_among(trainer.strategy, self._target(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.interrupted or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        file = self._target(trainer)
        extracted: Learngene = pl_module.learngene()  # type: ignore[operator]
        if not trainer.is_global_zero:
            return
        whole = dataclasses.replace(extracted, data=_data_arguments(trainer), step=trainer.global_step)
        save_learngene(whole, file, self.storage)
        rank_zero_info(f"The learngene was written to {file}.")

    def _target(self, trainer: Trainer) -> Path:
        """Return the path of the file; a collective call."""
        home = trainer.log_dir or trainer.default_root_dir  # `log_dir` is broadcast from rank 0
        return Path(home) / FILE_NAME if self.file is None else Path(self.file).expanduser()


def _data_arguments(trainer: Trainer) -> dict[str, Any] | None:
    """Return the class and the arguments of the datamodule, if there is one."""
    data: Any = getattr(trainer, "datamodule", None)
    if data is None:
        return None
    # Lightning's command line adds other names.
    arguments = {name: value for name, value in data.hparams.items() if not name.startswith("_")}
    return {"class": type(data).__name__, **arguments}
