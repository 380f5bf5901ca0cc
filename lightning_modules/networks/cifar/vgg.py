"""VGG (Simonyan and Zisserman) with BatchNorm and one linear layer, for small images.

Parameter names are those of the public checkpoints of the CRD benchmark.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from .classifier import Classifier, init_convolutions, init_linear, pool

_WIDTHS = (64, 128, 256, 512, 512)


class VGG(Classifier):
    """Five stages of 3x3 convolutions with max pooling between them.

    Images below 64 pixels are not pooled between the last two stages, where the map of 32 pixels has 4x4 positions.
    (The benchmark pools there at exactly 64 pixels, its largest size.)

    Args:
        convolutions: number of convolutions of each stage.
        num_classes: number of classes C.
    """

    feature_dim = _WIDTHS[-1]
    head = "classifier"
    stages = ("block1", "block2", "block3", "block4")

    def __init__(self, convolutions: tuple[int, int, int, int, int], num_classes: int) -> None:
        super().__init__()
        inputs = (3, *_WIDTHS)
        self.block0, self.block1, self.block2, self.block3, self.block4 = (
            _stage(inputs[stage], _WIDTHS[stage], count) for stage, count in enumerate(convolutions)
        )
        self.classifier = nn.Linear(self.feature_dim, num_classes)
        init_convolutions(self)
        init_linear(self.classifier)

    def forward_features(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to pooled features [B, D]."""
        maps = image
        for stage in (self.block0, self.block1, self.block2):
            maps = F.max_pool2d(stage(maps), 2)
        maps = self.block3(maps)
        if image.shape[-2] >= 64:
            maps = F.max_pool2d(maps, 2)
        return pool(self.block4(maps))


def _stage(inputs: int, width: int, convolutions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, *[width] * (convolutions - 1)):
        layers += Conv2dNormActivation(channels, width, bias=True)
    return nn.Sequential(*layers)
