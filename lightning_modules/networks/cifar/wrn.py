"""Wide residual networks (Zagoruyko and Komodakis), without dropout.

Blocks are pre-activation: BatchNorm and ReLU precede each convolution. Parameter names are those of the public
checkpoints of the CRD benchmark.
"""

from collections import OrderedDict

from torch import Tensor, nn

from .classifier import Classifier, init_convolutions, pool


class WideResNet(Classifier):
    """A 3x3 convolution to 16 channels, three groups of pre-activation blocks, and a last BatchNorm and ReLU.

    Args:
        depth: 6n + 4 layers, for n blocks a group.
        widen: factor k of the groups' 16, 32 and 64 channels.
        num_classes: number of classes C.

    Raises:
        ValueError: If the depth is not 6n + 4.
    """

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

    def classify(self, features: Tensor) -> Tensor:
        """Map features [B, D] to logits [B, C]."""
        return self.fc(features)


def _group(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    layers = nn.Sequential(
        _PreActivationBlock(inputs, width, stride), *(_PreActivationBlock(width, width, 1) for _ in range(blocks - 1))
    )
    return nn.Sequential(OrderedDict(layer=layers))  # a level in the public names


class _PreActivationBlock(nn.Module):
    """Two 3x3 convolutions; where the width changes, the shortcut is a 1x1 convolution of the activated input."""

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
