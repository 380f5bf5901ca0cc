"""CoCoRD's teacher: a classifier by name, or a network of the user's own."""

from typing import Any

import torch
from torch import Tensor, nn

from ...common.absent_network import AbsentNetwork
from ...common.errors import UserError
from ..core.frozen import Frozen, reads_weights
from ..core.settings import class_path
from ..networks.cifar import Classifier
from ..networks.classifier_files import load_frozen
from ..networks.classifiers import build_classifier
from ..networks.user_teacher import (
    TeacherImages,
    checked_output,
    network_of_setting,
    record,
    stated_normalization,
    stated_size,
    teacher_images,
)
from .settings import TeacherSettings

OPTION = "model.teacher.network"


class UserClassifier(Classifier):
    """A classifier of the user's own, whose features are the input of the linear layer that computes its logits.

    Args:
        network: maps images [B, 3, H, W] to logits [B, C]; it states its normalization.
        classes: number of classes C.

    Raises:
        UserError: If it does not, or no linear layer computes the logits.
    """

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__()
        stated_normalization(network)
        self.network = network.eval()
        self.images: TeacherImages | None = None
        computed: list[tuple[str, Tensor]] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, output, name=name: computed.append((name, output)))
            for name, layer in network.named_modules()
            if isinstance(layer, nn.Linear)
        ]
        remedy = "correct the class, set its attribute image_size, or set model.num_classes."
        side = stated_size(network) or 32
        try:
            logits = checked_output(network, network, torch.zeros(1, 3, side, side), classes, remedy)
        finally:
            for hook in hooks:
                hook.remove()
        last_name = next((name for name, output in reversed(computed) if output is logits), None)
        if last_name is None:
            raise UserError(
                f"Expected the logits of {class_path(network)} from a linear layer, whose input are the features, got "
                "them from another operation: return the output of an nn.Linear."
            )
        self.last_name = last_name
        self.feature_dim = self.last_layer.in_features

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] of the data to the input of the last layer [B, D]."""
        features: list[Tensor] = []
        hook = self.last_layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        try:
            self.network(image if self.images is None else self.images(image))
        finally:
            hook.remove()
        return features[-1]

    def classify(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, C]."""
        logits: Tensor = self.last_layer(features)
        return logits

    @property
    def last_layer(self) -> nn.Linear:
        """The linear layer that computes the logits."""
        layer = self.network.get_submodule(self.last_name)
        assert isinstance(layer, nn.Linear)
        return layer


class AbsentClassifier(Classifier):
    """A stand-in for a classifier of the user's own where a checkpoint is evaluated or exported.

    Args:
        feature_dim: width D of its features, which the checkpoint records.
        classes: number of classes C.
    """

    def __init__(self, feature_dim: int, classes: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.classes = classes

    def forward_features(self, image: Tensor) -> Tensor:
        """Refuse; in `without_weights` return zeros [B, D].

        Raises:
            UserError: Outside of `without_weights`.
        """
        return self._zeros(image, self.feature_dim)

    def classify(self, features: Tensor) -> Tensor:
        """Refuse, as `forward_features`; in `without_weights` return zeros [B, C]."""
        return self._zeros(features, self.classes)

    def _zeros(self, inputs: Tensor, width: int) -> Tensor:
        if not reads_weights():
            return inputs.new_zeros(len(inputs), width)
        raise UserError(f"Expected the teacher for training, got a checkpoint's settings without it: give {OPTION}.")


def build_teacher(teacher: TeacherSettings, classes: int) -> Classifier:
    """Build the teacher that a loss needs, without its weights if it has a name.

    Raises:
        UserError: If there is none, or a network of the user's own does not fit.
    """
    if isinstance(teacher.network, nn.Module) and not isinstance(teacher.network, AbsentNetwork):
        if teacher.name is not None:
            raise UserError(
                f"Expected one teacher, got model.teacher.name {teacher.name!r} and {OPTION}: leave one out."
            )
        if teacher.resize_to is not None:
            raise UserError(
                f"Expected the image size of {class_path(teacher.network)} as its attribute image_size, got "
                f"model.teacher.resize_to {teacher.resize_to}: leave the setting out."
            )
        return UserClassifier(teacher.network, classes)
    if teacher.name is not None:
        return build_classifier(teacher.name, classes, resize_to=teacher.resize_to)
    if teacher.feature_dim is not None:
        return AbsentClassifier(teacher.feature_dim, classes)
    raise UserError(
        f"Expected a teacher for the losses that learn from one, got none: set model.teacher.name, or {OPTION}."
    )


def load_teacher(frozen: Frozen[Classifier], teacher: TeacherSettings, classes: int, data: Any) -> None:
    """Load the teacher for training, unless it is loaded.

    Args:
        frozen: the teacher that `build_teacher` built.
        teacher: the settings.
        classes: number of classes C.
        data: the run's datamodule, or None.

    Raises:
        UserError: If the weights are missing or do not fit, or a restored checkpoint was trained with another teacher.
    """
    if teacher.name is not None:
        load_frozen(frozen, teacher.name, teacher.weights, classes)
    elif (network := network_of_setting(teacher.network, OPTION)) is not None:
        if isinstance(frozen.network, UserClassifier):
            frozen.network.images = teacher_images(network, data)
        if not frozen.loaded:
            record(frozen, network, OPTION)
