"""VGG (Simonyan and Zisserman) with BatchNorm and one linear layer, for small images.

The names are those of the public checkpoints of the CRD benchmark.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from .classifier import Classifier, init_convolutions, init_linear, pool

_WIDTHS = (64, 128, 256, 512, 512)


class VGG(Classifier):
    """Five stages of 3x3 convolutions with max-pools between them.

    Between the last two stages there is a max-pool only from 64 pixels on: at 32 pixels the map has 4x4 positions by
    then. The benchmark has it at 64 pixels exactly; larger images, which it has not, get it here too.

    Args:
        convolutions: how many each stage has.
        num_classes: C.
    """

    feature_dim = _WIDTHS[-1]

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
        """Image [B, 3, H, W] to pooled features [B, D]."""
        maps = image
        for stage in (self.block0, self.block1, self.block2):
            maps = F.max_pool2d(stage(maps), 2)
        maps = self.block3(maps)
        if image.shape[-2] >= 64:
            maps = F.max_pool2d(maps, 2)
        return pool(self.block4(maps))

    def classify(self, features: Tensor) -> Tensor:
        """Features [B, D] to logits [B, C]."""
        return self.classifier(features)


def _stage(inputs: int, width: int, convolutions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, *[width] * (convolutions - 1)):
        layers += Conv2dNormActivation(channels, width, bias=True)
    return nn.Sequential(*layers)
