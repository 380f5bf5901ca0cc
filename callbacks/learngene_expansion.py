"""The learngene of a CLIP: written when its extraction ends, and what networks of other runs start from."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from .checkpoints.checkpoint_io import check_free_among
from .learngene.expansion import expand_learngene
from .learngene.file import Learngene, Storage, load_learngene, save_learngene
from .learngene.layers import Components, Tower
from .modules import find_module


class LearngeneExpansionCallback(Callback):
    """Lets networks in a module start a fit from a learngene, whatever the module is.

    A network is open_clip's CLIP or one of its towers, or timm's ViT, of 6 to 12 layers where the learngene is of a
    CLIP of 12 (see :func:`expand_learngene`). It has to be there when the fit starts, so the module makes it in its
    constructor. It is filled in before it is sharded and before a checkpoint is restored, whose weights therefore stay;
    a run that is resumed does without the file. A second `fit` goes on from where the first one ended.

    Args:
        file: The learngene's file.
        target: Attribute path of the network in the module, or several, such as `["student", "average"]` where a moving
            average starts as the student does.
        tower: The tower of a CLIP that is set; the other one stays as it is; by default what the network has.
        components: What to take of each sum: "unimodal" and "multimodal" are for ablations.
    """

    replaces_initial_weights = True

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
        self._missing: FileNotFoundError | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Expands the learngene.

        Raises:
            AttributeError: If there is no such network.
            TypeError: If it is of another kind.
            ValueError: If it is of another size, or the file is no learngene.
            RuntimeError: If the file cannot be read.
        """
        if stage != "fit" or self._module is pl_module:
            return
        self._module = pl_module
        networks = {path: find_module(pl_module, path, nn.Module, "target of the learngene") for path in self.targets}
        try:
            learngene = load_learngene(self.file)
        except FileNotFoundError as error:  # Lightning does not say yet whether a checkpoint will be restored
            self._missing = error
            return
        for path, network in networks.items():
            said = expand_learngene(learngene, network, self.tower, self.components)
            rank_zero_info(f"Learngene {self.file}, {path}: {said}")
        adopt = getattr(pl_module, "adopt_preprocessing", None)
        if callable(adopt):  # a descendant sees images as its ancestor did
            adopt(learngene.preprocessing)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._missing = None

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._require()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._require()

    def _require(self) -> None:
        if self._missing is not None:
            raise self._missing


class LearngeneWriter(Callback):
    """Writes the learngene of a module into a file when a fit is done.

    Not after one that was stopped: its checkpoint goes on. The module gives it as `learngene() -> Learngene`, which
    every process calls; of what it was trained on and for how many steps, this callback knows more.

    Args:
        file: Where to; by default `learngene.safetensors` in the run's folder. There must be nothing yet.
        storage: "float16" halves the file.
    """

    def __init__(self, file: str | None = None, storage: Storage = "float32") -> None:
        super().__init__()
        self.file = file
        self.storage: Storage = storage

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks before training that there is something to write, and nothing in the way.

        Raises:
            AttributeError: If the module has no learngene.
            FileExistsError: If there is something of that name.
        """
        if stage != "fit":
            return
        if not callable(getattr(pl_module, "learngene", None)):
            raise AttributeError(
                f"LearngeneWriter found no method learngene() in {type(pl_module).__name__}: train a module that "
                "extracts one, such as MMLGModule, or leave the callback out."
            )
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_free_among(trainer.strategy, self._target(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.interrupted or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        file = self._target(trainer)
        found: Learngene = pl_module.learngene()  # type: ignore[operator]
        if not trainer.is_global_zero:
            return
        whole = dataclasses.replace(found, data=_described(trainer), step=trainer.global_step)
        save_learngene(whole, file, self.storage)
        rank_zero_info(f"The learngene was written to {file}.")

    def _target(self, trainer: Trainer) -> Path:
        """The file; every process must ask for it."""
        home = trainer.log_dir or trainer.default_root_dir  # which the processes agree on
        return Path(home) / "learngene.safetensors" if self.file is None else Path(self.file).expanduser()


def _described(trainer: Trainer) -> dict[str, Any] | None:
    """What is known of the data that a run trains on."""
    data: Any = getattr(trainer, "datamodule", None)
    if data is None:
        return None
    # Under the command line Lightning adds names of its own.
    arguments = {name: value for name, value in data.hparams.items() if not name.startswith("_")}
    return {"class": type(data).__name__, **arguments}
