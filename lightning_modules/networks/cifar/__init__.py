"""The 22 CIFAR networks of the CRD benchmark.

State dicts have the keys, shapes and order of the checkpoints that the benchmark published.
"""

from collections.abc import Callable
from functools import partial

from .classifier import Classifier, Stages
from .mobile import MobileNetV2, ShuffleNetV1, ShuffleNetV2
from .resnet import BasicResNet, BottleneckResNet, WideResNet
from .vgg import VGG

__all__ = ["CIFAR_NETWORKS", "Classifier", "Stages"]

CIFAR_NETWORKS: dict[str, Callable[[int], Classifier]] = {
    **{f"resnet{depth}": partial(BasicResNet, depth, 16, (16, 32, 64)) for depth in (8, 14, 20, 32, 44, 56, 110)},
    **{f"resnet{depth}x4": partial(BasicResNet, depth, 32, (64, 128, 256)) for depth in (8, 32)},
    **{f"wrn_{depth}_{widen}": partial(WideResNet, depth, widen) for depth in (16, 40) for widen in (1, 2)},
    "vgg8": partial(VGG, (1, 1, 1, 1, 1)),
    "vgg11": partial(VGG, (1, 1, 2, 2, 2)),
    "vgg13": partial(VGG, (2, 2, 2, 2, 2)),
    "vgg16": partial(VGG, (2, 2, 3, 3, 3)),
    "vgg19": partial(VGG, (2, 2, 4, 4, 4)),
    "MobileNetV2": MobileNetV2,
    "ShuffleV1": ShuffleNetV1,
    "ShuffleV2": ShuffleNetV2,
    "ResNet50": BottleneckResNet,
}
"""Network builders by name; each takes the number of classes."""
