"""Image classifiers by name: the CIFAR networks, and the models of torchvision and timm.

Shapes: B images, D features, C classes.
"""

from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.names import did_you_mean
from .cifar import CIFAR_NETWORKS, Classifier
from .user_teacher import TeacherImages


def freeze_classifier(network: Classifier) -> None:
    """Freeze the parameters that turn features into logits."""
    weights = list(network.parameters())
    with torch.enable_grad():
        logits = network.classify(torch.zeros(1, network.feature_dim))
        gradients = torch.autograd.grad(logits.sum(), weights, allow_unused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            weight.requires_grad_(False)


class LibraryClassifier(Classifier):
    """Split a classifier of torchvision or timm into its features and its last layer.

    The last layer is linear, or a 1x1 convolution of pooled features, which some models of timm have instead.

    Args:
        network: model of the library, whose last layer computes the logits.
        classes: number of its classes, by which the last layer is recognized.
        resize_to: side in pixels to which it resizes its images; None takes them as they are.

    Raises:
        UserError: If the model does not have exactly one such layer, for example because it has two heads, or requires
            another image size.
    """

    def __init__(self, network: nn.Module, classes: int, resize_to: int | None = None) -> None:
        super().__init__()
        last = [
            name
            for name, module in network.named_modules()
            if _is_head(name) and _has_outputs(module, classes, network)
        ]
        if len(last) != 1:
            listed = f" ({', '.join(last)})" if last else ""
            raise UserError(
                f"Expected one last layer with {classes} outputs in {type(network).__name__}, got "
                f"{len(last)}{listed}: use another network."
            )
        self.network = network
        self.image_size = _only_size(network)
        self.resized: TeacherImages | None = None
        if resize_to is not None:
            if self.image_size not in (None, resize_to):
                raise UserError(
                    f"Expected images of {self.image_size} pixels for {type(network).__name__}, got the setting "
                    f"{resize_to}: set it to {self.image_size}."
                )
            self.image_size = None
            self.resized = TeacherImages(resize_to, None, None)
        layers = [f"layer{number}" for number in range(1, 5)]  # of residual networks in both libraries
        self.stages = [f"network.{name}" for name in layers] if all(hasattr(network, name) for name in layers) else []
        self.last = last[0]
        layer = network.get_submodule(self.last)
        layer.__class__ = _LastLinear if isinstance(layer, nn.Linear) else _LastConv
        self.feature_dim = self._layer().weight.shape[1]

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the input of the last layer [B, D]."""
        layer = self._layer()
        layer.open = True
        try:
            features: Tensor = self.network(image if self.resized is None else self.resized(image))
        finally:
            layer.open = False
        return features

    def classify(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, C]."""
        layer = self._layer()
        logits: Tensor = layer(features if isinstance(layer, _LastLinear) else features[:, :, None, None])
        return logits.flatten(1)

    def _layer(self) -> "_LastLinear | _LastConv":
        layer = self.network.get_submodule(self.last)
        assert isinstance(layer, _LastLinear | _LastConv)
        return layer


def _only_size(network: Any) -> int | None:
    """Return the image size that a vision transformer of torchvision or timm requires; None where it takes any."""
    patches: Any = getattr(network, "patch_embed", None)  # of timm
    if getattr(patches, "strict_img_size", False):
        return int(patches.img_size[0])
    side = getattr(network, "image_size", None)  # of torchvision
    return side if isinstance(side, int) else None


class _LastLinear(nn.Linear):
    """A linear layer that returns its input while `open` is set."""

    open = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.open else super().forward(input)


class _LastConv(nn.Conv2d):
    """A 1x1 convolution that returns its input while `open` is set."""

    open = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.open else super().forward(input)


def _is_head(name: str) -> bool:
    """Return whether a layer is named like a classification head, in any model family of both libraries."""
    first = name.split(".")[0]
    return first in ("fc", "last_linear") or "head" in first or first.startswith("classif")


def _has_outputs(module: nn.Module, classes: int, network: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):  # its input is pooled in timm, but a map in torchvision's SqueezeNet
        pooled = type(network).__module__.startswith("timm.")
        return pooled and module.kernel_size == (1, 1) and module.out_channels == classes
    return isinstance(module, nn.Linear) and module.out_features == classes


def build_classifier(
    name: str, classes: int, pretrained: str | None = None, resize_to: int | None = None
) -> Classifier:
    """Build a classifier.

    Args:
        name: name of a CIFAR network, or of a model of torchvision or timm, searched in this order;
            "torchvision/<model>" and "timm/<model>" select the library.
        classes: number of classes C.
        pretrained: name of the library's weights to download, such as "IMAGENET1K_V1" (torchvision), or a tag of timm.
        resize_to: side in pixels to which a model of a library resizes its images; None takes them as they are.

    Raises:
        UserError: If there is no such model, the weights are for another number of classes, or the model cannot take
            images of that size.
    """
    library, _, model = name.rpartition("/")
    if library not in ("", "torchvision", "timm"):
        raise UserError(
            f"Expected the name of a model, or 'torchvision/' or 'timm/' and the name, got {name!r}: correct it."
        )
    if not library and model in CIFAR_NETWORKS:
        if pretrained is not None:
            raise UserError(f"Expected a file with weights of {name}, got {pretrained!r}: name a file.")
        if resize_to is not None:
            raise UserError(
                f"Expected a model of torchvision or timm that resizes its images to {resize_to} pixels, got {name}, "
                "which takes images of any size: leave the setting out."
            )
        return CIFAR_NETWORKS[model](classes)
    if library != "timm" and model in torchvision.models.list_models(module=torchvision.models):
        return LibraryClassifier(_torchvision(model, classes, pretrained), classes, resize_to)
    if library != "torchvision" and timm.is_model(model):
        tagged = model if pretrained in (None, "DEFAULT") else f"{model}.{pretrained}"
        if pretrained is not None:
            _check_classes(timm.models.get_pretrained_cfg(tagged).num_classes, classes, pretrained, name)
        made = timm.create_model(tagged, pretrained=pretrained is not None, num_classes=classes)
        return LibraryClassifier(made, classes, resize_to)
    names = [*CIFAR_NETWORKS, *torchvision.models.list_models(module=torchvision.models), *timm.list_models()]
    raise UserError(
        f"Expected a CIFAR network or a model of torchvision or timm, got {name!r}: {did_you_mean(model, names)}"
    )


def _torchvision(model: str, classes: int, pretrained: str | None) -> nn.Module:
    one_head = {"aux_logits": False} if model in ("googlenet", "inception_v3") else {}
    if pretrained is None:
        return torchvision.models.get_model(model, weights=None, num_classes=classes, **one_head)
    weights: Any = torchvision.models.get_model_weights(model)
    if pretrained not in weights.__members__:
        raise UserError(
            f"Expected one of {', '.join(weights.__members__)} as weights of {model}, got {pretrained!r}: correct it."
        )
    _check_classes(len(weights[pretrained].meta["categories"]), classes, pretrained, model)
    return torchvision.models.get_model(model, weights=weights[pretrained], **one_head)


def _check_classes(labels: int, classes: int, pretrained: str, model: str) -> None:
    # timm would silently replace the trained last layer by a random one.
    if labels != classes:
        raise UserError(
            f"Expected weights of {model} for {classes} classes, got {pretrained} for {labels}: set num_classes."
        )


def public_network(classifier: nn.Module) -> nn.Module:
    """Return the module whose state dict has the published names: the library's model, or the classifier itself."""
    return classifier.network if isinstance(classifier, LibraryClassifier) else classifier
