"""ShuffleNetV1 (Zhang et al., 3 groups) and ShuffleNetV2 (Ma et al., 1x) with a stem that does not shrink.

The names are those of the public checkpoints of the CRD benchmark, which is why the units of V2 are not torchvision's:
theirs compute the same, under other names. Layers start as PyTorch draws them, in the benchmark as in torchvision.
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
    """Interleave the channels of the groups: [B, D, H, W], where channel j of group i goes to place j * groups + i."""
    return maps.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleNetV1(Classifier):
    """Three stages of 4, 8 and 4 units with 240, 480 and 960 channels.

    Args:
        num_classes: C.
    """

    feature_dim = 960

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = _convolution(3, _STEM)
        self.bn1 = nn.BatchNorm2d(_STEM)
        self.layer1 = _stage_v1(_STEM, 240, 4, first_groups=1)  # 24 channels are too few for groups, says the paper
        self.layer2 = _stage_v1(240, 480, 8)
        self.layer3 = _stage_v1(480, 960, 4)
        self.linear = nn.Linear(self.feature_dim, num_classes)

    def forward_features(self, image: Tensor) -> Tensor:
        """Image [B, 3, H, W] to pooled features [B, D]."""
        maps = F.relu(self.bn1(self.conv1(image)))
        return pool(self.layer3(self.layer2(self.layer1(maps))))

    def classify(self, features: Tensor) -> Tensor:
        """Features [B, D] to logits [B, C]."""
        return self.linear(features)


def _stage_v1(inputs: int, width: int, units: int, first_groups: int = 3) -> nn.Sequential:
    first = _UnitV1(inputs, width - inputs, stride=2, first_groups=first_groups)
    return nn.Sequential(first, *(_UnitV1(width, width, stride=1, first_groups=3) for _ in range(units - 1)))


class _UnitV1(nn.Module):
    """A bottleneck of grouped 1x1 convolutions; with stride 2 its input is pooled and put behind its output."""

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
        """Maps [B, I, H, W] to [B, width, H, W], or with stride 2 to [B, width + I, H / 2, W / 2]."""
        residual = _shuffle(F.relu(self.bn1(self.conv1(maps))), self.groups)
        # A ReLU follows the convolution of each channel too: the benchmark has one here, the paper has none.
        residual = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(residual)))))
        if self.stride == 1:
            return F.relu(residual + maps)
        return F.relu(torch.cat([residual, F.avg_pool2d(maps, 3, stride=2, padding=1)], 1))


class ShuffleNetV2(Classifier):
    """Three stages of 4, 8 and 4 units with 116, 232 and 464 channels, and a 1x1 convolution to 1024.

    Args:
        num_classes: C.
    """

    feature_dim = 1024

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
        """Image [B, 3, H, W] to pooled features [B, D]."""
        maps = F.relu(self.bn1(self.conv1(image)))
        maps = self.layer3(self.layer2(self.layer1(maps)))
        return pool(F.relu(self.bn2(self.conv2(maps))))

    def classify(self, features: Tensor) -> Tensor:
        """Features [B, D] to logits [B, C]."""
        return self.linear(features)


def _stage_v2(inputs: int, width: int, units: int) -> nn.Sequential:
    return nn.Sequential(_DownUnitV2(inputs, width), *(_UnitV2(width) for _ in range(units - 1)))


class _UnitV2(nn.Module):
    """Half of the channels pass unchanged, half go through a bottleneck; then the halves are shuffled."""

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
        """Maps [B, width, H, W] to maps of the same shape."""
        kept, changed = maps.chunk(2, dim=1)
        changed = F.relu(self.bn1(self.conv1(changed)))
        changed = self.bn2(self.conv2(changed))
        changed = F.relu(self.bn3(self.conv3(changed)))
        return _shuffle(torch.cat([kept, changed], 1), 2)


class _DownUnitV2(nn.Module):
    """The unit of stride 2: all channels go through both branches, which halve the map, and are shuffled."""

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
        """Maps [B, I, H, W] to maps [B, width, H / 2, W / 2]."""
        left = self.bn1(self.conv1(maps))
        left = F.relu(self.bn2(self.conv2(left)))
        right = F.relu(self.bn3(self.conv3(maps)))
        right = self.bn4(self.conv4(right))
        right = F.relu(self.bn5(self.conv5(right)))
        return _shuffle(torch.cat([left, right], 1), 2)
