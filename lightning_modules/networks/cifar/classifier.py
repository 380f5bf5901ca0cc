"""Base class and initialization of the CIFAR networks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn


class Stages(NamedTuple):
    """Outputs of a classifier on the way to its logits."""

    maps: list[Tensor]  # feature maps of the stages [B, D_i, H_i, W_i]
    features: Tensor  # pooled features [B, D]


class Classifier(nn.Module, ABC):
    """A network that pools its last feature map to a vector and classifies it with one linear layer.

    Shapes: B images of H x W pixels, D features, C classes.
    """

    feature_dim: int
    """Width D of the features."""
    head: str
    """Name of the submodule that maps features to logits, for a class that does not override `classify`."""
    image_size: int | None = None
    """Required image size H = W in pixels; None where any size is accepted."""
    stages: Sequence[str] = ()
    """Names of the submodules whose outputs are the feature maps of the stages, without the stem; () if unknown."""

    @abstractmethod
    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""

    def classify(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, C]."""
        logits: Tensor = self.get_submodule(self.head)(features)
        return logits

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, C]."""
        return self.classify(self.forward_features(image))

    def forward_stages(self, image: Tensor, maps: bool = True) -> Stages:
        """Map images [B, 3, H, W] to the feature maps of the stages, if these are asked for, and pooled features."""
        outputs: list[Tensor] = []
        modules = [self.get_submodule(name) for name in (self.stages if maps else ())]
        hooks = [module.register_forward_hook(lambda _, __, output: outputs.append(output)) for module in modules]
        try:
            return Stages(outputs, self.forward_features(image))
        finally:
            for hook in hooks:
                hook.remove()


def pool(maps: Tensor) -> Tensor:
    """Average feature maps [B, D, H, W] over all positions, [B, D].

    The published networks pool over a fixed window, which is the whole map for images of 32 pixels. Pooling over the
    whole map also accepts other image sizes.
    """
    return maps.mean((-2, -1))


def init_convolutions(network: nn.Module) -> None:
    """Initialize convolutions by Kaiming's rule for the fan-out, N(0, 2 / (k * k * outputs)), with zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def init_linear(layer: nn.Linear) -> None:
    """Initialize the weight from N(0, 0.01^2), as VGG does, and the bias with zeros."""
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
