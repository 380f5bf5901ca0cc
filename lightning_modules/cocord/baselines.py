"""Baselines that learn from the teacher's features, with the constants of the CRD benchmark.

Shapes: B images, D channels, H x W positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...callbacks.distributed.collectives import keep_from_ddp
from ...common.errors import UserError
from ..base.start import restores_after_setup
from ..core.frozen import Frozen
from ..core.precision import at_least_float32, unit
from ..networks.cifar import Classifier, Stages
from .crd import CRD
from .settings import KDSettings

HINT_STAGE = 1  # the second of those without the stem, the benchmark's default


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
            self.crd = CRD(
                student.feature_dim, teacher.network.feature_dim, kd.crd_negatives, temperature=kd.crd_temperature
            )

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
            losses["hint"] = self.hint(student.maps[HINT_STAGE], teacher.maps[HINT_STAGE])
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
            name = "none" if data is None else type(data).__name__
            raise UserError(
                f"Expected a datamodule that knows the labels of its training images for kd.crd_weight, got {name}: "
                "use ImageClassificationDataModule, or another with `training_labels`."
            )
        self.crd.start(data.training_labels())
        keep_from_ddp(module, [self.crd])

    def update(self) -> None:
        """Write the batch into CRD's banks; for `on_after_backward`."""
        if self.crd is not None:
            self.crd.update()


def check_stages(student: Classifier, teacher: Classifier) -> None:
    """Check that two networks have equally many stages, two at least.

    Raises:
        UserError: If they have not, or their stages are unknown.
    """
    student_stages = len(student.stages)
    teacher_stages = len(teacher.stages)
    if student_stages != teacher_stages or student_stages < 2:
        raise UserError(
            "Expected equally many stages of student and teacher for kd.attention_weight and kd.hint_weight, got "
            f"{student_stages} and {teacher_stages}: use CIFAR networks of such a pair, or residual networks of a "
            "library."
        )


def attention(maps: Tensor) -> Tensor:
    """Return the mean squared activation over the channels at each position, of unit length: [B, H * W]."""
    return unit(at_least_float32(maps).square().mean(1).flatten(1))


def attention_loss(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Compute the loss of attention transfer (Zagoruyko and Komodakis, arXiv 1612.03928).

    It is the squared difference of attention, mean over images and positions, and sum over the stages. The larger of
    two maps is averaged to the size of the smaller one (CRD benchmark).

    Args:
        student: maps [B, D_i, H_i, W_i].
        teacher: maps [B, E_i, I_i, J_i], without gradient.
    """
    losses = []
    for student_map, teacher_map in zip(student, teacher, strict=True):
        height = min(student_map.shape[-2], teacher_map.shape[-2])
        width = min(student_map.shape[-1], teacher_map.shape[-1])
        student_map = F.adaptive_avg_pool2d(at_least_float32(student_map), (height, width))
        teacher_map = F.adaptive_avg_pool2d(at_least_float32(teacher_map), (height, width))
        losses.append((attention(student_map) - attention(teacher_map)).square().mean())
    return torch.stack(losses).sum()


class Hint(nn.Module):
    """Regress the teacher's map of the second stage from the student's (FitNet: Romero et al., arXiv 1412.6550).

    The regressor is a convolution, BatchNorm and ReLU. The convolution is 1x1; where one map is twice as large, it is
    3x3 with stride 2, or transposed 4x4 with stride 2. The CRD benchmark trains the regressor together with the
    student, not in a stage before.

    Args:
        student: the student's network.
        teacher: the teacher's network.

    Raises:
        UserError: If one map is more than twice as large as the other.
    """

    def __init__(self, student: Classifier, teacher: Classifier) -> None:
        super().__init__()
        student_channels, student_side = _hint_shape(student)
        teacher_channels, teacher_side = _hint_shape(teacher)
        convolution: nn.Module
        if student_side == teacher_side:
            convolution = nn.Conv2d(student_channels, teacher_channels, 1)
        elif student_side == 2 * teacher_side:
            convolution = nn.Conv2d(student_channels, teacher_channels, 3, stride=2, padding=1)
        elif 2 * student_side == teacher_side:
            convolution = nn.ConvTranspose2d(student_channels, teacher_channels, 4, stride=2, padding=1)
        else:
            raise UserError(
                "Expected maps of equal size, or one of twice the other's, in the second stages for kd.hint_weight, "
                f"got {student_side} and {teacher_side} positions a side: use another student or teacher."
            )
        self.regressor = nn.Sequential(convolution, nn.BatchNorm2d(teacher_channels), nn.ReLU(inplace=True))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Compute the mean squared error of the student's map [B, D, H, W] and the teacher's [B, E, I, J]."""
        return F.mse_loss(at_least_float32(self.regressor(student)), at_least_float32(teacher))


@torch.no_grad()
def _hint_shape(network: Classifier) -> tuple[int, int]:
    """Return channels and side of the map of the second stage."""
    training = network.training
    side = network.image_size or 32
    maps = network.eval().forward_stages(torch.zeros(1, 3, side, side)).maps
    network.train(training)
    return maps[HINT_STAGE].shape[1], maps[HINT_STAGE].shape[-1]
