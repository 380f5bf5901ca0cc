"""ShuffleNetV1 (Zhang et al., 3 groups) and ShuffleNetV2 (Ma et al., 1x) with a stem of stride 1.

Parameter names are those of the public checkpoints of the CRD benchmark. torchvision's units of V2 compute the same
with other names. Layers keep PyTorch's default initialisation, as in the benchmark and in torchvision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .classifier import Classifier, pool

_STEM = 24


def _convolution(inputs: int, width: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, width, 1, groups=groups, bias=False)


def _depthwise(width: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False)


def _shuffle(maps: Tensor, groups: int) -> Tensor:
    """Interleave the channels of the groups in [B, D, H, W]: channel j of group i moves to position j * groups + i."""
    return maps.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleNetV1(Classifier):
    """Three stages of 4, 8 and 4 units with 240, 480 and 960 channels.

    Args:
        num_classes: number of classes C.
    """

    feature_dim = 960
    stages = ("layer1", "layer2", "layer3")

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = _convolution(3, _STEM)
        self.bn1 = nn.BatchNorm2d(_STEM)
        self.layer1 = _stage_v1(_STEM, 240, 4, first_groups=1)  # no groups for the 24 input channels (the paper)
        self.layer2 = _stage_v1(240, 480, 8)
        self.layer3 = _stage_v1(480, 960, 4)
        self.linear = nn.Linear(self.feature_dim, num_classes)

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        maps = F.relu(self.bn1(self.conv1(image)))
        return pool(self.layer3(self.layer2(self.layer1(maps))))

    def classify(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, C]."""
        return self.linear(features)


def _stage_v1(inputs: int, width: int, units: int, first_groups: int = 3) -> nn.Sequential:
    first = _UnitV1(inputs, width - inputs, stride=2, first_groups=first_groups)
    return nn.Sequential(first, *(_UnitV1(width, width, stride=1, first_groups=3) for _ in range(units - 1)))


class _UnitV1(nn.Module):
    """A bottleneck of grouped 1x1 convolutions; with stride 2 the pooled input is concatenated to its output."""

    def __init__(self, inputs: int, width: int, stride: int, first_groups: int) -> None:
        super().__init__()
        hidden = width // 4
        self.stride, self.groups = stride, first_groups
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
    """Three stages of 4, 8 and 4 units with 116, 232 and 464 channels, and a 1x1 convolution to 1024.

    Args:
        num_classes: number of classes C.
    """

    feature_dim = 1024
    stages = ("layer1", "layer2", "layer3")

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = _convolution(3, _STEM)
        self.bn1 = nn.BatchNorm2d(_STEM)
        self.layer1 = _stage_v2(_STEM, 116, 4)
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

    def classify(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, C]."""
        return self.linear(features)


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
        left = self.bn1(self.conv1(maps))
        left = F.relu(self.bn2(self.conv2(left)))
        right = F.relu(self.bn3(self.conv3(maps)))
        right = self.bn4(self.conv4(right))
        right = F.relu(self.bn5(self.conv5(right)))
        return _shuffle(torch.cat([left, right], 1), 2)
