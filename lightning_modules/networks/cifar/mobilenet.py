"""MobileNetV2 (Sandler et al.) at half width, as the CRD benchmark has it for small images.

It differs from torchvision's: ReLU and not ReLU6, an expansion also in the first block, strides for 32 pixels, the
last convolution not narrowed, and no dropout. The names are those of the public checkpoints.
"""

from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from .classifier import Classifier, init_convolutions, init_linear, pool

# Expansion, channels, blocks and stride of the first of them: the paper's table 2 with half the channels, and stride 1
# in the second stage because the images are small.
_STAGES = (
    (1, 8, 1, 1),
    (6, 12, 2, 1),
    (6, 16, 3, 2),
    (6, 32, 4, 2),
    (6, 48, 3, 1),
    (6, 80, 3, 2),
    (6, 160, 1, 1),
)


class MobileNetV2(Classifier):
    """A stem of stride 2, seven stages of inverted residuals and a 1x1 convolution: total stride 16.

    Args:
        num_classes: C.
    """

    feature_dim = 1280

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        channels = 16
        self.conv1 = Conv2dNormActivation(3, channels, stride=2)
        stages = []
        for expansion, width, blocks, stride in _STAGES:
            first = _InvertedResidual(channels, width, stride, expansion)
            rest = (_InvertedResidual(width, width, 1, expansion) for _ in range(blocks - 1))
            stages.append(nn.Sequential(first, *rest))
            channels = width
        self.blocks = nn.Sequential(*stages)
        self.conv2 = Conv2dNormActivation(channels, self.feature_dim, kernel_size=1)
        linear = nn.Linear(self.feature_dim, num_classes)
        self.classifier = nn.Sequential(linear)  # the public names have this level
        init_convolutions(self)
        init_linear(linear)

    def forward_features(self, image: Tensor) -> Tensor:
        """Image [B, 3, H, W] to pooled features [B, D]."""
        return pool(self.conv2(self.blocks(self.conv1(image))))

    def classify(self, features: Tensor) -> Tensor:
        """Features [B, D] to logits [B, C]."""
        return self.classifier(features)


class _InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 convolution of each channel, 1x1 projection without ReLU; a residual where shapes allow."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.residual = stride == 1 and inputs == width
        self.conv = nn.Sequential(  # flat, as the public names are
            *Conv2dNormActivation(inputs, hidden, kernel_size=1),
            *Conv2dNormActivation(hidden, hidden, stride=stride, groups=hidden),
            *Conv2dNormActivation(hidden, width, kernel_size=1, activation_layer=None),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Maps [B, I, H, W] to maps [B, width, H / stride, W / stride]."""
        return maps + self.conv(maps) if self.residual else self.conv(maps)
