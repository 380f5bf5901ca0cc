"""SGD as in the CRD benchmark."""

from torch import nn
from torch.optim import SGD


def sgd(module: nn.Module, learning_rate: float, momentum: float, weight_decay: float) -> SGD:
    """Return SGD on all trainable parameters of a module, with weight decay for vectors too.

    Args:
        module: module to train.
        learning_rate: initial learning rate.
        momentum: momentum.
        weight_decay: weight decay of all parameters.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return SGD(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay, foreach=True)
