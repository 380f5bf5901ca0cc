"""MobileNetV2 (Sandler et al.) at half width for small images, from the CRD benchmark.

Differences from torchvision's: ReLU instead of ReLU6, an expansion in the first block too, strides for 32 pixels, a
last convolution of full width, and no dropout. Parameter names are those of the public checkpoints.
"""

from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from .classifier import Classifier, init_convolutions, init_linear, pool

# Expansion, channels, number of blocks and stride of the first block: the paper's with half the channels, and
# with stride 1 in the second stage because the images are small.
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
        num_classes: number of classes C.
    """

    feature_dim = 1280
    stages = ("blocks.1", "blocks.2", "blocks.4", "blocks.6")  # the last of each size, as in the benchmark

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
        self.classifier = nn.Sequential(linear)  # a level in the public names
        init_convolutions(self)
        init_linear(linear)

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        return pool(self.conv2(self.blocks(self.conv1(image))))

    def classify(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, C]."""
        return self.classifier(features)


class _InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution and linear 1x1 projection, with a residual where shapes agree."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.residual = stride == 1 and inputs == width
        self.conv = nn.Sequential(  # flat, as in the public names
            *Conv2dNormActivation(inputs, hidden, kernel_size=1),
            *Conv2dNormActivation(hidden, hidden, stride=stride, groups=hidden),
            *Conv2dNormActivation(hidden, width, kernel_size=1, activation_layer=None),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Map features [B, I, H, W] to [B, width, H / stride, W / stride]."""
        return maps + self.conv(maps) if self.residual else self.conv(maps)
