"""Residual networks for small images: three stages of basic blocks, wide ones, and ResNet-50 with a stem of stride 1.

Basic and bottleneck blocks are torchvision's; parameter names are those of the public checkpoints of the CRD benchmark.
"""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from .classifier import Classifier, init_convolutions, pool


class BasicResNet(Classifier):
    """The CIFAR residual network of He et al., with 1x1 convolutions where a block changes the width.

    This is option B of that paper, as in the benchmark; option A pads with zeros instead.

    Args:
        depth: 6n + 2 layers, for n blocks a stage.
        stem: channels of the first convolution.
        widths: channels of the three stages, the last of which is the feature width.
        num_classes: number of classes C.

    Raises:
        ValueError: If the depth is not 6n + 2.
    """

    head = "fc"
    stages = ("layer1", "layer2", "layer3")

    def __init__(self, depth: int, stem: int, widths: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"Expected a depth of 6n + 2 for n blocks in each stage, got {depth}: use 8, 20 or 110.")
        blocks = (depth - 2) // 6
        self.feature_dim = widths[2]
        self.conv1 = nn.Conv2d(3, stem, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(stem, widths[0], blocks, stride=1)
        self.layer2 = _stage(widths[0], widths[1], blocks, stride=2)
        self.layer3 = _stage(widths[1], widths[2], blocks, stride=2)
        self.fc = nn.Linear(widths[2], num_classes)
        init_convolutions(self)

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        maps = self.relu(self.bn1(self.conv1(image)))
        return pool(self.layer3(self.layer2(self.layer1(maps))))


def _stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    shortcut = None
    if stride != 1 or inputs != width:
        shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
    first = BasicBlock(inputs, width, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(width, width) for _ in range(blocks - 1)))


class BottleneckResNet(Classifier):
    """torchvision's ResNet-50 with a 3x3 stem of stride 1 and no max-pool: 32-pixel images end as 4x4 maps.

    Args:
        num_classes: number of classes C.
    """

    head = "linear"
    stages = ("layer1", "layer2", "layer3", "layer4")

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        # torchvision's initialization is the benchmark's: Kaiming-normal, and no zero for a block's last BatchNorm.
        body = ResNet(_Bottleneck, [3, 4, 6, 3], num_classes)
        self.feature_dim = body.fc.in_features
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        init_convolutions(self.conv1)
        self.bn1 = body.bn1
        self.relu = body.relu
        self.layer1 = body.layer1
        self.layer2 = body.layer2
        self.layer3 = body.layer3
        self.layer4 = body.layer4
        self.linear = body.fc

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        maps = self.relu(self.bn1(self.conv1(image)))
        return pool(self.layer4(self.layer3(self.layer2(self.layer1(maps)))))


class _Bottleneck(Bottleneck):
    """torchvision's block with `downsample` renamed to `shortcut`, as in the public checkpoints."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shortcut = nn.Identity() if self.downsample is None else self.downsample
        del self.downsample

    def forward(self, maps: Tensor) -> Tensor:
        """Map features [B, P, H, W] to [B, 4 * planes, H / stride, W / stride]."""
        residual = self.relu(self.bn1(self.conv1(maps)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        return self.relu(residual + self.shortcut(maps))


class WideResNet(Classifier):
    """Wide residual network (Zagoruyko and Komodakis) without dropout.

    A 3x3 convolution to 16 channels, three groups of pre-activation blocks, and a last BatchNorm and ReLU.

    Args:
        depth: 6n + 4 layers, for n blocks a group.
        widen: factor k of the groups' 16, 32 and 64 channels.
        num_classes: number of classes C.

    Raises:
        ValueError: If the depth is not 6n + 4.
    """

    head = "fc"
    stages = ("block1", "block2", "block3")

    def __init__(self, depth: int, widen: int, num_classes: int) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"Expected a depth of 6n + 4 for n blocks in each group, got {depth}: use 16 or 40.")
        blocks = (depth - 4) // 6
        self.feature_dim = 64 * widen
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = _group(16, 16 * widen, blocks, stride=1)
        self.block2 = _group(16 * widen, 32 * widen, blocks, stride=2)
        self.block3 = _group(32 * widen, 64 * widen, blocks, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(64 * widen, num_classes)
        init_convolutions(self)
        nn.init.zeros_(self.fc.bias)

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        maps = self.block3(self.block2(self.block1(self.conv1(image))))
        return pool(self.relu(self.bn1(maps)))


def _group(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    layers = nn.Sequential(
        _PreActivationBlock(inputs, width, stride), *(_PreActivationBlock(width, width, 1) for _ in range(blocks - 1))
    )
    return nn.Sequential(OrderedDict(layer=layers))  # a level in the public names


class _PreActivationBlock(nn.Module):
    """BatchNorm and ReLU before each of two 3x3 convolutions.

    Where the width changes, the shortcut is a 1x1 convolution of the activated input.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.convShortcut = nn.Conv2d(inputs, width, 1, stride, bias=False) if inputs != width else None

    def forward(self, maps: Tensor) -> Tensor:
        """Map features [B, I, H, W] to [B, width, H / stride, W / stride]."""
        activated = self.relu(self.bn1(maps))
        residual = self.conv2(self.relu(self.bn2(self.conv1(activated))))
        return residual + (maps if self.convShortcut is None else self.convShortcut(activated))
