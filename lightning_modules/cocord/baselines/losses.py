"""The baselines' losses of features by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ....callbacks.distributed.collectives import keep_from_ddp
from ....common.errors import UserError
from ...base.start import restores_after_setup
from ...core.frozen import Frozen
from ...networks.cifar import Classifier, Stages
from ..settings import KDSettings
from .attention import attention_loss, check_stages
from .crd import CRD
from .hint import STAGE, Hint


class FeatureLosses(nn.Module):
    """CRD, attention transfer and FitNet's hint, each where it has a weight.

    Args:
        kd: the settings.
        student: the student's network.
        teacher: the teacher.

    Raises:
        UserError: If the networks do not fit a loss.
    """

    def __init__(self, kd: KDSettings, student: Classifier, teacher: Frozen[Classifier] | None) -> None:
        super().__init__()
        assert teacher is not None
        if kd.maps:
            check_stages(student, teacher.network)
        self.attention = kd.attention_weight > 0
        self.hint = Hint(student, teacher.network) if kd.hint_weight else None
        self.crd: CRD | None = None
        if kd.crd_weight:
            widths = student.feature_dim, teacher.network.feature_dim
            self.crd = CRD(*widths, kd.crd_negatives, kd.crd_temperature)

    def forward(self, student: Stages, teacher: Stages, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the losses of a batch.

        Args:
            student: outputs of the student for the view `image`.
            teacher: outputs of the teacher for it, without gradient.
            batch: the batch, with `sample_index` [B] and `label` [B].
        """
        losses = {}
        if self.crd is not None:
            losses["crd"] = self.crd(student.features, teacher.features, batch["sample_index"], batch["label"])
        if self.attention:
            losses["attention"] = attention_loss(student.maps, teacher.maps)
        if self.hint is not None:
            losses["hint"] = self.hint(student.maps[STAGE], teacher.maps[STAGE])
        return losses

    def start(self, module: Any) -> None:
        """Make CRD's banks for the training images of a run; for `setup`.

        Raises:
            UserError: If the data does not know its labels, or the strategy shards.
        """
        if self.crd is None:
            return
        if restores_after_setup(module):
            raise UserError(
                "Expected one process or DDP for kd.crd_weight, whose banks are not sharded, got a strategy that "
                "shards: set trainer.strategy to ddp."
            )
        data = module.datamodule
        if not hasattr(data, "training_labels"):
            found = "none" if data is None else type(data).__name__
            raise UserError(
                f"Expected a datamodule that knows the labels of its training images for kd.crd_weight, got {found}: "
                "use ImageClassificationDataModule, or another with `training_labels`."
            )
        self.crd.start(data.training_labels())
        keep_from_ddp(module, [self.crd])

    def update(self) -> None:
        """Write the batch into CRD's banks; for `on_after_backward`."""
        if self.crd is not None:
            self.crd.update()
