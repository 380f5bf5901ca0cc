"""SGD as the CRD benchmark trains."""

from torch import nn
from torch.optim import SGD


def sgd(module: nn.Module, learning_rate: float, momentum: float, weight_decay: float) -> SGD:
    """Return SGD on all trainable parameters of a module, vectors decayed too.

    Args:
        module: what trains.
        learning_rate: learning rate at the start.
        momentum: momentum.
        weight_decay: weight decay of all parameters.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return SGD(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay, foreach=True)
