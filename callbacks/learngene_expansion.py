"""Networks that are initialized from the learngene of a CLIP."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from ..common.errors import UserError
from .learngene.layers import Components, Tower
from .modules import find_module


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
        from .learngene.expansion import expand_learngene  # needs open_clip and timm
        from .learngene.file import MissingLearngene, load_learngene

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
