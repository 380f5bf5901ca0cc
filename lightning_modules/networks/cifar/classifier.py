"""What the CIFAR networks have in common: pooled features, one linear layer, and how they start."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Classifier(nn.Module, ABC):
    """A network that pools its last map to one feature vector and classifies it with one linear layer.

    Shapes: B images of H x W pixels, D features, C classes.
    """

    feature_dim: int
    """Width D of the features."""
    image_size: int | None = None
    """Side of the images, H and W, where it takes one size only."""

    @abstractmethod
    def forward_features(self, image: Tensor) -> Tensor:
        """Image [B, 3, H, W] to pooled features [B, D]."""

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Features [B, D] to logits [B, C]."""

    def forward(self, image: Tensor) -> Tensor:
        """Image [B, 3, H, W] to logits [B, C]."""
        return self.classify(self.forward_features(image))


def pool(maps: Tensor) -> Tensor:
    """Average maps [B, D, H, W] over all positions: [B, D].

    The networks were published with windows of the size that their last map has at 32 pixels, which is the same there;
    the whole map makes any other size work too.
    """
    return maps.mean((-2, -1))


def init_convolutions(network: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / (k * k * outputs)), Kaiming's rule for the fan-out, with zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def init_linear(layer: nn.Linear) -> None:
    """Draw the weight from N(0, 0.01^2), as VGG does, with a zero bias."""
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
