"""MobileNetV2, ShuffleNetV1 and ShuffleNetV2 for small images, from the CRD benchmark.

Parameter names are those of the public checkpoints. Layers of the ShuffleNets keep PyTorch's default initialization, as
in the benchmark and in torchvision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from .classifier import Classifier, init_convolutions, init_linear, pool

_SHUFFLENET_STEM = 24
# Expansion, channels, number of blocks and stride of the first block: the paper's with half the channels, and
# with stride 1 in the second stage because the images are small.
_MOBILENET_STAGES = (
    (1, 8, 1, 1),
    (6, 12, 2, 1),
    (6, 16, 3, 2),
    (6, 32, 4, 2),
    (6, 48, 3, 1),
    (6, 80, 3, 2),
    (6, 160, 1, 1),
)


class MobileNetV2(Classifier):
    """MobileNetV2 (Sandler et al.) at half width.

    A stem of stride 2, seven stages of inverted residuals and a 1x1 convolution; the total stride is 16.
    Differences from torchvision's: ReLU instead of ReLU6, an expansion in the first block too, strides for 32 pixels, a
    last convolution of full width, and no dropout.

    Args:
        num_classes: number of classes C.
    """

    feature_dim = 1280
    head = "classifier"
    stages = ("blocks.1", "blocks.2", "blocks.4", "blocks.6")  # the last of each size, as in the benchmark

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        channels = 16
        self.conv1 = Conv2dNormActivation(3, channels, stride=2)
        stages = []
        for expansion, width, blocks, stride in _MOBILENET_STAGES:
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


def _convolution(inputs: int, width: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, width, 1, groups=groups, bias=False)


def _depthwise(width: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False)


def _shuffle(maps: Tensor, groups: int) -> Tensor:
    """Interleave the channels of the groups in [B, D, H, W]: channel j of group i moves to position j * groups + i."""
    return maps.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleNetV1(Classifier):
    """ShuffleNetV1 (Zhang et al., 3 groups) with a stem of stride 1.

    Three stages of 4, 8 and 4 units have 240, 480 and 960 channels.

    Args:
        num_classes: number of classes C.
    """

    feature_dim = 960
    head = "linear"
    stages = ("layer1", "layer2", "layer3")

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = _convolution(3, _SHUFFLENET_STEM)
        self.bn1 = nn.BatchNorm2d(_SHUFFLENET_STEM)
        # The paper has no groups for the 24 input channels.
        self.layer1 = _stage_v1(_SHUFFLENET_STEM, 240, 4, first_groups=1)
        self.layer2 = _stage_v1(240, 480, 8)
        self.layer3 = _stage_v1(480, 960, 4)
        self.linear = nn.Linear(self.feature_dim, num_classes)

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        maps = F.relu(self.bn1(self.conv1(image)))
        return pool(self.layer3(self.layer2(self.layer1(maps))))


def _stage_v1(inputs: int, width: int, units: int, first_groups: int = 3) -> nn.Sequential:
    first = _UnitV1(inputs, width - inputs, stride=2, first_groups=first_groups)
    return nn.Sequential(first, *(_UnitV1(width, width, stride=1, first_groups=3) for _ in range(units - 1)))


class _UnitV1(nn.Module):
    """A bottleneck of grouped 1x1 convolutions; with stride 2 the pooled input is concatenated to its output."""

    def __init__(self, inputs: int, width: int, stride: int, first_groups: int) -> None:
        super().__init__()
        hidden = width // 4
        self.stride = stride
        self.groups = first_groups
        self.conv1 = _convolution(inputs, hidden, first_groups)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = _depthwise(hidden, stride)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv3 = _convolution(hidden, width, groups=3)
        self.bn3 = nn.BatchNorm2d(width)

    def forward(self, maps: Tensor) -> Tensor:
        """Map features [B, I, H, W] to [B, width, H, W], or with stride 2 to [B, width + I, H / 2, W / 2]."""
        residual = _shuffle(F.relu(self.bn1(self.conv1(maps))), self.groups)
        # The benchmark has a ReLU after the depthwise convolution, the paper has none.
        residual = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(residual)))))
        if self.stride == 1:
            return F.relu(residual + maps)
        return F.relu(torch.cat([residual, F.avg_pool2d(maps, 3, stride=2, padding=1)], 1))


class ShuffleNetV2(Classifier):
    """ShuffleNetV2 (Ma et al., 1x) with a stem of stride 1.

    Three stages of 4, 8 and 4 units with 116, 232 and 464 channels, and a 1x1 convolution to 1024. torchvision's units
    compute the same with other names.

    Args:
        num_classes: number of classes C.
    """

    feature_dim = 1024
    head = "linear"
    stages = ("layer1", "layer2", "layer3")

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = _convolution(3, _SHUFFLENET_STEM)
        self.bn1 = nn.BatchNorm2d(_SHUFFLENET_STEM)
        self.layer1 = _stage_v2(_SHUFFLENET_STEM, 116, 4)
        self.layer2 = _stage_v2(116, 232, 8)
        self.layer3 = _stage_v2(232, 464, 4)
        self.conv2 = _convolution(464, self.feature_dim)
        self.bn2 = nn.BatchNorm2d(self.feature_dim)
        self.linear = nn.Linear(self.feature_dim, num_classes)

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        maps = F.relu(self.bn1(self.conv1(image)))
        maps = self.layer3(self.layer2(self.layer1(maps)))
        return pool(F.relu(self.bn2(self.conv2(maps))))


def _stage_v2(inputs: int, width: int, units: int) -> nn.Sequential:
    return nn.Sequential(_DownUnitV2(inputs, width), *(_UnitV2(width) for _ in range(units - 1)))


class _UnitV2(nn.Module):
    """Apply a bottleneck to half of the channels, keep the other half, and shuffle both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.conv1 = _convolution(half, half)
        self.bn1 = nn.BatchNorm2d(half)
        self.conv2 = _depthwise(half, stride=1)
        self.bn2 = nn.BatchNorm2d(half)
        self.conv3 = _convolution(half, half)
        self.bn3 = nn.BatchNorm2d(half)

    def forward(self, maps: Tensor) -> Tensor:
        """Map features [B, width, H, W] to the same shape."""
        kept, changed = maps.chunk(2, dim=1)
        changed = F.relu(self.bn1(self.conv1(changed)))
        changed = self.bn2(self.conv2(changed))
        changed = F.relu(self.bn3(self.conv3(changed)))
        return _shuffle(torch.cat([kept, changed], 1), 2)


class _DownUnitV2(nn.Module):
    """Apply two branches of stride 2 to all channels, and shuffle their outputs."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        half = width // 2
        self.conv1 = _depthwise(inputs, stride=2)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv2 = _convolution(inputs, half)
        self.bn2 = nn.BatchNorm2d(half)
        self.conv3 = _convolution(inputs, half)
        self.bn3 = nn.BatchNorm2d(half)
        self.conv4 = _depthwise(half, stride=2)
        self.bn4 = nn.BatchNorm2d(half)
        self.conv5 = _convolution(half, half)
        self.bn5 = nn.BatchNorm2d(half)

    def forward(self, maps: Tensor) -> Tensor:
        """Map features [B, I, H, W] to [B, width, H / 2, W / 2]."""
        short = self.bn1(self.conv1(maps))
        short = F.relu(self.bn2(self.conv2(short)))
        long = F.relu(self.bn3(self.conv3(maps)))
        long = self.bn4(self.conv4(long))
        long = F.relu(self.bn5(self.conv5(long)))
        return _shuffle(torch.cat([short, long], 1), 2)
