"""Callbacks that write a module's learngene when its extraction ends, and initialize networks from one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from ...common.errors import UserError
from ..checkpoints.checkpoint_io import check_free_among
from ..modules import find_module
from .file import FILE_NAME, Learngene, MissingLearngene, Storage, load_learngene, save_learngene
from .layers import Components, Tower


class LearngeneExpansionCallback(Callback):
    """Initialize networks of any module from a learngene when a fit starts.

    A network is open_clip's CLIP or one of its towers, or timm's ViT, of 6 to 12 layers for the learngene of a CLIP of
    12 layers (see `learngene.expansion.expand_learngene`). The module builds the network in its constructor. The
    callback fills it before it is sharded and before a checkpoint is restored: the weights of a checkpoint override the
    learngene, and a resumed run does not need the file. A second `fit` of the same module continues from the end of the
    first.

    Args:
        file: path of the learngene's file, or a folder as in `learngene.file.load_learngene`.
        target: attribute path of the network in the module, or a list of paths, such as `["student", "average"]` for a
            student and its moving average.
        tower: the only tower of a CLIP to initialize; by default every tower that the network has.
        components: terms to take of each sum: "unimodal" and "multimodal" are for ablations.
    """

    replaces_initial_weights = True
    """Modules refuse other initial weights beside such a callback."""

    def __init__(
        self,
        file: str,
        target: str | list[str],
        tower: Tower | None = None,
        components: Components = "both",
    ) -> None:
        super().__init__()
        self.file = file
        self.targets: Sequence[str] = [target] if isinstance(target, str) else list(target)
        self.tower = tower
        self.components = components
        self._module: LightningModule | None = None
        self._missing: UserError | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Expand the learngene.

        Raises:
            UserError: If there is no such network, it does not fit, or the file is not a learngene.
        """
        if stage != "fit" or self._module is pl_module:
            return
        from .expansion import expand_learngene  # needs open_clip and timm

        self._module = pl_module
        networks = {path: find_module(pl_module, path, nn.Module, "target of the learngene") for path in self.targets}
        try:
            learngene = load_learngene(self.file)
        except MissingLearngene as error:  # whether a checkpoint will be restored is not known yet
            self._missing = error
            return
        for path, network in networks.items():
            done = expand_learngene(learngene, network, self.tower, self.components)
            rank_zero_info(f"Learngene {self.file}, {path}: {done}")
        adopt = getattr(pl_module, "adopt_preprocessing", None)
        if callable(adopt):  # descendants see images as the network that the learngene was extracted from
            adopt(learngene.preprocessing)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._missing = None

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._require_file()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._require_file()

    def _require_file(self) -> None:
        if self._missing is not None:
            raise self._missing


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
