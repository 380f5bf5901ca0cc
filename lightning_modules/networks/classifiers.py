"""CoCoRD's networks: any classifier by name, the projection head, and the predictor.

Shapes: B images, D features, E = 2048 values of a query or key, C classes.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

from .cifar import CIFAR_NETWORKS, Classifier


class ProjectionHead(nn.Sequential):
    """Features [B, D] to queries or keys [B, E] (g and f of the paper's section 3.1; sizes from the authors' code).

    Args:
        features: width D.
        hidden: width between the two layers.
        embed_dim: width E. (2048: 16.78 MB for 2048 keys in the paper's Table 12.)
    """

    def __init__(self, features: int, hidden: int = 2048, embed_dim: int = 2048) -> None:
        super().__init__(
            nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, embed_dim)
        )


class Predictor(nn.Sequential):
    """Queries [B, E] to predictions of another view's query [B, E] (h in eq. 5; sizes from the authors' code).

    Args:
        embed_dim: width E.
        hidden: width between the two layers.
    """

    def __init__(self, embed_dim: int = 2048, hidden: int = 512) -> None:
        super().__init__(
            nn.Linear(embed_dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, embed_dim)
        )


def each_view(head: nn.Sequential, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a head or a predictor on several views [B, ...] by name, as if each had come alone.

    The views share the passes of the linear layers, whose weights are what costs with few rows. BatchNorm sees one view
    at a time: in train mode it takes its statistics from the rows that it sees.
    """
    rows = torch.cat(list(views.values()))
    for layer in head:
        if isinstance(layer, nn.BatchNorm1d):
            rows = torch.cat([layer(view) for view in rows.chunk(len(views))])
        else:
            rows = layer(rows)
    return dict(zip(views, rows.chunk(len(views)), strict=True))


def freeze_classifier(network: Classifier) -> None:
    """Let what makes logits of features stay as it is in training."""
    weights = list(network.parameters())
    with torch.enable_grad():
        logits = network.classify(torch.zeros(1, network.feature_dim))
        gradients = torch.autograd.grad(logits.sum(), weights, allow_unused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            weight.requires_grad_(False)


class LibraryClassifier(Classifier):
    """A classifier of torchvision or timm, with its features and its last layer apart.

    The last layer is linear, or the convolution of pooled features that some of timm's models have in its place.

    Args:
        network: the library's module, whose last layer gives the logits.
        classes: number of its classes, to know that layer by.

    Raises:
        ValueError: if there is no such layer, or several, as for models with two heads.
    """

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__()
        last = [name for name, module in network.named_modules() if _is_head(name) and _gives(module, classes, network)]
        if len(last) != 1:
            found = f"{len(last)} last layers with {classes} outputs" + (f" ({', '.join(last)})" if last else "")
            raise ValueError(
                f"Found {found} in {type(network).__name__}, expected one, which classifies: use another network."
            )
        self.network = network
        self.image_size = _only_size(network)
        self.last = last[0]
        layer = network.get_submodule(self.last)
        layer.__class__ = _LastLinear if isinstance(layer, nn.Linear) else _LastConv
        self.feature_dim = self._layer().weight.shape[1]

    def forward_features(self, image: Tensor) -> Tensor:
        """Image [B, 3, H, W] to what the last layer reads, [B, D]."""
        layer = self._layer()
        layer.open = True
        try:
            features: Tensor = self.network(image)
        finally:
            layer.open = False
        return features

    def classify(self, features: Tensor) -> Tensor:
        """Features [B, D] to logits [B, C]."""
        layer = self._layer()
        logits: Tensor = layer(features if isinstance(layer, _LastLinear) else features[:, :, None, None])
        return logits.flatten(1)

    def _layer(self) -> "_LastLinear | _LastConv":
        layer = self.network.get_submodule(self.last)
        assert isinstance(layer, _LastLinear | _LastConv)
        return layer


def _only_size(network: Any) -> int | None:
    """Side of the images for which a vision transformer of torchvision or timm was made, if it takes no other."""
    patches: Any = getattr(network, "patch_embed", None)  # of timm
    if getattr(patches, "strict_img_size", False):
        return int(patches.img_size[0])
    side = getattr(network, "image_size", None)  # of torchvision
    return side if isinstance(side, int) else None


class _LastLinear(nn.Linear):
    """A linear layer that lets its input through while it is open."""

    open = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.open else super().forward(input)


class _LastConv(nn.Conv2d):
    """A 1x1 convolution that lets its input through while it is open."""

    open = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.open else super().forward(input)


def _is_head(name: str) -> bool:
    """Whether a layer's name is that of a classifier, in all the families of both libraries; second heads too."""
    first = name.split(".")[0]
    return first in ("fc", "last_linear") or "head" in first or first.startswith("classif")


def _gives(module: nn.Module, classes: int, network: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):  # in timm it sees pooled features, in torchvision's SqueezeNet a map
        pooled = type(network).__module__.startswith("timm.")
        return pooled and module.kernel_size == (1, 1) and module.out_channels == classes
    return isinstance(module, nn.Linear) and module.out_features == classes


def build_classifier(name: str, classes: int, pretrained: str | None = None) -> Classifier:
    """Make a classifier.

    Args:
        name: one of the CIFAR networks, or a model of torchvision or timm, in this order of preference;
            "torchvision/<model>" and "timm/<model>" say which.
        classes: number of classes C.
        pretrained: name of the library's own weights, such as "IMAGENET1K_V1" (torchvision), or the tag of timm's;
            they are downloaded.

    Raises:
        ValueError: if there is no such model, or the weights are for another number of classes.
    """
    library, _, model = name.rpartition("/")
    if library not in ("", "torchvision", "timm"):
        raise ValueError(f"Found {name!r}, expected a model's name, or one after 'torchvision/' or 'timm/'.")
    if not library and model in CIFAR_NETWORKS:
        if pretrained is not None:
            raise ValueError(f"There are no weights {pretrained!r} of {name}: give a file.")
        return CIFAR_NETWORKS[model](classes)
    if library != "timm" and model in torchvision.models.list_models(module=torchvision.models):
        return LibraryClassifier(_torchvision(model, classes, pretrained), classes)
    if library != "torchvision" and timm.is_model(model):
        tagged = model if pretrained in (None, "DEFAULT") else f"{model}.{pretrained}"
        if pretrained is not None:
            _check_classes(timm.models.get_pretrained_cfg(tagged).num_classes, classes, pretrained, name)
        made = timm.create_model(tagged, pretrained=pretrained is not None, num_classes=classes)
        return LibraryClassifier(made, classes)
    raise ValueError(_unknown(name, model))


def _torchvision(model: str, classes: int, pretrained: str | None) -> nn.Module:
    one_head = {"aux_logits": False} if model in ("googlenet", "inception_v3") else {}
    if pretrained is None:
        return torchvision.models.get_model(model, weights=None, num_classes=classes, **one_head)
    weights: Any = torchvision.models.get_model_weights(model)
    if pretrained not in weights.__members__:
        raise ValueError(f"{model} has the weights {', '.join(weights.__members__)}, not {pretrained!r}.")
    _check_classes(len(weights[pretrained].meta["categories"]), classes, pretrained, model)
    return torchvision.models.get_model(model, weights=weights[pretrained], **one_head)


def _check_classes(found: int, classes: int, pretrained: str, model: str) -> None:
    # timm would put a new last layer in the place of the trained one, and say nothing.
    if found != classes:
        raise ValueError(
            f"The weights {pretrained} of {model} tell {found} classes apart, expected {classes}: set num_classes."
        )


def _unknown(name: str, model: str) -> str:
    known = [*CIFAR_NETWORKS, *torchvision.models.list_models(module=torchvision.models), *timm.list_models()]
    near = get_close_matches(model, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the CIFAR networks are {', '.join(CIFAR_NETWORKS)}."
    return f"There is no classifier {name!r} among the CIFAR networks, torchvision's and timm's; {hint}"


def public_network(classifier: nn.Module) -> nn.Module:
    """The module whose state dict has the published names: a library's own, or the classifier itself."""
    return classifier.network if isinstance(classifier, LibraryClassifier) else classifier
