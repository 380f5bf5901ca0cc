"""Targets of CoCoRD's losses.

Shapes: B images, D features, E values of a key, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..networks.cifar import Classifier, Stages
from .network import ProjectionHead, each_view
from .settings import ContrastSettings, Encoder, PredictionSettings

_OTHER_VIEW = {"image": "image_slow", "image_slow": "image"}


class Needs(NamedTuple):
    """What the contrastive and the predictive loss need, where they have a weight."""

    views: list[str]  # of each image in a training batch
    student_views: list[str]  # those that the student encodes
    encoders: set[Encoder]  # without gradient


def needs_of(contrast: ContrastSettings, prediction: PredictionSettings) -> Needs:
    """Return what the losses need; the student's first view is needed in any case."""
    needs = Needs(["image"], ["image"], set())
    if prediction.weight:
        needs.views.append("image_slow")
        needs.encoders.add(prediction.encoder)
        if prediction.symmetric:
            needs.student_views.append("image_slow")
    if contrast.weight:
        needs.views.append("image_teacher")
        needs.encoders.add(contrast.encoder)
    return needs


class Targets(NamedTuple):
    """Results of the encoders without gradient that the losses need."""

    key: Tensor | None  # key [B, E] of the view `image_teacher`
    cognates: dict[str, Tensor]  # key [B, E] of the other view, by the student's view
    logits: Tensor | None  # the teacher's logits [B, C] of the view `image`
    stages: Stages | None  # the teacher's features of the view `image`, and the maps if these are needed


@dataclass(frozen=True)
class TargetEncoders:
    """The encoders without gradient.

    Args:
        teacher: the teacher's network, in eval mode.
        teacher_head: its projection head.
        slow_student: the moving average of the student.
        slow_head: its projection head.
        key: encoder of the dictionary's keys; None without a contrastive loss.
        cognate: encoder of the cognate keys; None without a predictive loss.
        logits: whether a loss needs the teacher's logits.
        features: whether a loss needs the teacher's features.
        maps: whether a loss needs the teacher's maps too.
    """

    teacher: Classifier | None
    teacher_head: ProjectionHead | None
    slow_student: Classifier | None
    slow_head: ProjectionHead | None
    key: Encoder | None
    cognate: Encoder | None
    logits: bool
    features: bool = False
    maps: bool = False

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor], student_views: Sequence[str]) -> Targets:
        """Encode a batch of views [B, 3, H, W].

        Args:
            batch: the views by name.
            student_views: views that the student encodes; the key of the other view is the cognate of each.
        """
        others = [_OTHER_VIEW[view] for view in student_views]
        taught = self._teacher_stages(batch, others)
        features = {view: stages.features for view, stages in taught.items()}
        key: Tensor | None = None
        cognates: dict[str, Tensor] = {}
        if self.key is not None:
            key = self._keys(self.key, ["image_teacher"], batch, features)["image_teacher"]
        if self.cognate is not None:
            keys = self._keys(self.cognate, others, batch, features)
            cognates = {view: keys[_OTHER_VIEW[view]] for view in student_views}
        logits = self.teacher.classify(features["image"]) if self.logits and self.teacher is not None else None
        return Targets(key, cognates, logits, taught["image"] if self.features else None)

    def _teacher_stages(self, batch: Mapping[str, Tensor], others: Sequence[str]) -> dict[str, Stages]:
        """Run the teacher on all views needed, in one pass: in eval mode rows are independent."""
        views: list[str] = []
        if self.logits or self.features:
            views.append("image")
        if self.key == "teacher":
            views.append("image_teacher")
        if self.cognate == "teacher":
            views += [view for view in others if view not in views]
        if self.teacher is None or not views:
            return {}
        maps, features = self.teacher.forward_stages(torch.cat([batch[view] for view in views]), self.maps)
        each = [[part.chunk(len(views))[number] for part in maps] for number in range(len(views))]
        stages = map(Stages, each, features.chunk(len(views)))
        return dict(zip(views, stages, strict=True))

    def _keys(
        self, encoder: Encoder, views: Sequence[str], batch: Mapping[str, Tensor], teacher: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Compute keys [B, E] of views one by one, since BatchNorm's statistics are those of a call."""
        if encoder == "teacher":
            assert self.teacher_head is not None
            return each_view(self.teacher_head, {view: teacher[view] for view in views})
        assert self.slow_student is not None
        assert self.slow_head is not None
        return each_view(self.slow_head, {view: self.slow_student.forward_features(batch[view]) for view in views})
