"""Settings of CoCoRD and of the linear probe.

Defaults come from the paper (Fu et al., BMVC 2023; numbers of sections, equations and tables are those of the version
submitted to ICLR 2023), the authors' code, and the CRD benchmark, whose recipe both follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn

from ...common.errors import UserError
from ...common.ranges import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    RATE,
    SHARE,
    SettingsGroup,
)

Encoder = Literal["teacher", "slow_student"]


@dataclass(frozen=True)
class TeacherSettings(SettingsGroup, option="teacher"):
    """The teacher.

    Args:
        name: name of the teacher's network, in the form of the student's. None without a loss that needs a teacher.
        weights: a file (checkpoint of a `CoCoRDModule` with this student, public checkpoint of the CRD benchmark, or
            safetensors); the folder of a run, whose newest last checkpoint is used; or the name of the library's
            weights, such as IMAGENET1K_V1.
        resize_to: side in pixels to which a teacher of torchvision or timm resizes the images of the data. None takes
            them as they are.
        network: a classifier of your own, without a name, that states the normalization of its images
            (docs/own_teachers.md).
        feature_dim: width of the features of `network`; a checkpoint records it. Leave it out.
    """

    name: str | None = None
    weights: str | None = None
    resize_to: Annotated[int | None, COUNT] = None
    network: nn.Module | None = None
    feature_dim: Annotated[int | None, COUNT] = None


@dataclass(frozen=True)
class ContrastSettings(SettingsGroup, option="contrast"):
    """The contrastive loss (eq. 2).

    Args:
        weight: weight of the loss (sections 4.1 and 4.2).
        temperature: temperature tau (section 4.3.3: 0.1; ImageNet: 0.07).
        queue_size: number N of keys in the dictionary (section 4.3.3: 2048; ImageNet: 65536).
        queue_start: "empty" masks slots until they are filled; "random" starts with random unit vectors as negatives
            (authors' code).
        encoder: encoder of the keys (Table 5).
    """

    weight: Annotated[float, NOT_NEGATIVE] = 1.0
    temperature: Annotated[float, POSITIVE] = 0.1
    queue_size: Annotated[int, COUNT] = 2048
    queue_start: Literal["empty", "random"] = "empty"
    encoder: Encoder = "teacher"


@dataclass(frozen=True)
class PredictionSettings(SettingsGroup, option="prediction"):
    """The predictive loss (eqs. 6 and 7).

    Args:
        weight: weight of the loss, or of the sum of both directions (sections 4.1 and 4.2).
        symmetric: also predict the first view from the second (eq. 7; not on ImageNet, section 4.2).
        encoder: encoder of the cognate keys, the targets of the prediction (Table 5).
    """

    weight: Annotated[float, NOT_NEGATIVE] = 4.0
    symmetric: bool = True
    encoder: Encoder = "slow_student"


@dataclass(frozen=True)
class KDSettings(SettingsGroup, option="kd"):
    """Distillation of the teacher's class distribution (Hinton et al., arXiv 1503.02531), and of its features.

    The losses of features are baselines, with the weights and constants of the CRD benchmark.

    Args:
        weight: weight of the loss. CoCoRD+KD: 1. KD alone: 0.9, with `class_weight` 0.1 (CRD benchmark).
        temperature: temperature of both distributions (CRD benchmark).
        crd_weight: weight of CRD (Tian et al., arXiv 1910.10699). CRD benchmark: 0.8.
        crd_negatives: number of negatives of each image for CRD.
        crd_temperature: temperature of CRD.
        attention_weight: weight of attention transfer (Zagoruyko and Komodakis, arXiv 1612.03928). CRD benchmark: 1000.
        hint_weight: weight of FitNet's hint (Romero et al., arXiv 1412.6550). CRD benchmark: 100.
    """

    weight: Annotated[float, NOT_NEGATIVE] = 0.0
    temperature: Annotated[float, POSITIVE] = 4.0
    crd_weight: Annotated[float, NOT_NEGATIVE] = 0.0
    crd_negatives: Annotated[int, COUNT] = 16384
    crd_temperature: Annotated[float, POSITIVE] = 0.07
    attention_weight: Annotated[float, NOT_NEGATIVE] = 0.0
    hint_weight: Annotated[float, NOT_NEGATIVE] = 0.0

    @property
    def features(self) -> bool:
        """Whether a loss needs the teacher's features."""
        return bool(self.crd_weight) or self.maps

    @property
    def maps(self) -> bool:
        """Whether a loss needs the maps of the stages."""
        return bool(self.attention_weight or self.hint_weight)


@dataclass(frozen=True)
class HeadSettings(SettingsGroup, option="heads"):
    """Projection heads and predictor.

    Args:
        embed_dim: embedding dimension E of queries and keys (appendix A.1).
        hidden: hidden width of the projection heads (authors' code).
        predictor_hidden: hidden width of the predictor (authors' code).
    """

    embed_dim: Annotated[int, COUNT] = 2048
    hidden: Annotated[int, COUNT] = 2048
    predictor_hidden: Annotated[int, COUNT] = 512


@dataclass(frozen=True)
class MomentumSettings(SettingsGroup, option="momentum"):
    """Moving averages (eqs. 3 and 4).

    Args:
        slow_student: momentum m_r of the slow-moving student and its head (Table 6).
        teacher_head: momentum m_c of the teacher's head (Table 6). A teacher whose features have another width than
            the student's keeps a random head.
    """

    slow_student: Annotated[float, SHARE] = 0.9
    teacher_head: Annotated[float, SHARE] = 0.999


@dataclass(frozen=True)
class OptimSettings(SettingsGroup, option="optim"):
    """SGD with milestones (CRD benchmark).

    Args:
        learning_rate: initial learning rate. None: 0.05, or 0.01 for MobileNets and ShuffleNets.
        lr_milestones: epochs after which the learning rate decays.
        lr_decay: multiplicative learning-rate decay at each milestone.
        momentum: momentum of SGD.
        weight_decay: weight decay of all parameters.
    """

    learning_rate: Annotated[float | None, RATE] = None
    lr_milestones: Annotated[tuple[int, ...], COUNT] = (150, 180, 210)
    lr_decay: Annotated[float, POSITIVE_SHARE] = 0.1
    momentum: Annotated[float, BELOW_ONE] = 0.9
    weight_decay: Annotated[float, NOT_NEGATIVE] = 5e-4


@dataclass(frozen=True)
class ProbeOptimSettings(SettingsGroup, option="optim"):
    """SGD with milestones for the linear probe (giakoumoglou/distillers, the nearest public implementation).

    Args:
        learning_rate: initial learning rate (that implementation: 0.01 for MobileNets and ShuffleNets).
        lr_milestones: epochs after which the learning rate decays.
        lr_decay: multiplicative learning-rate decay at each milestone.
        momentum: momentum of SGD.
        weight_decay: weight decay of weight and bias.
    """

    learning_rate: Annotated[float, RATE] = 0.05
    lr_milestones: Annotated[tuple[int, ...], COUNT] = (30, 60, 90)
    lr_decay: Annotated[float, POSITIVE_SHARE] = 0.1
    momentum: Annotated[float, BELOW_ONE] = 0.9
    weight_decay: Annotated[float, NOT_NEGATIVE] = 5e-4


def loss_weights(
    class_weight: float, kd: KDSettings, contrast: ContrastSettings, prediction: PredictionSettings
) -> dict[str, float]:
    """Return the weights of the losses by name.

    Raises:
        UserError: If no loss trains the classifier's last layers.
    """
    weights = {
        "class": class_weight,
        "kd": kd.weight,
        "contrast": contrast.weight,
        "prediction": prediction.weight,
        "crd": kd.crd_weight,
        "attention": kd.attention_weight,
        "hint": kd.hint_weight,
    }
    if not any(weights.values()):
        raise UserError(
            "Expected a loss, got 0 for class_weight, kd.weight, contrast.weight, prediction.weight, kd.crd_weight, "
            "kd.attention_weight, kd.hint_weight: raise class_weight."
        )
    if kd.maps and not (class_weight or kd.weight):
        raise UserError(
            "Expected a loss of the logits beside kd.attention_weight or kd.hint_weight, which train earlier layers, "
            "got class_weight 0 and kd.weight 0: raise class_weight."
        )
    return weights


def default_learning_rate(student: str) -> float:
    """Return the initial learning rate of the CRD benchmark for a student."""
    return 0.01 if any(family in student.lower() for family in ("mobilenet", "shuffle")) else 0.05
