"""The random matrices of transformers that start without trained weights."""

from torch import nn


def init_linear(module: nn.Module, std: float | None = None) -> None:
    """Initialize a linear layer from a normal distribution, its bias with zeros; leave other modules as they are.

    By default the standard deviation is 1 / sqrt(inputs), as that of the queries, keys and values of CLIP's towers,
    which were trained from random weights: an output has the variance of an input at any width. BERT and ViT have 0.02,
    with which the blocks of a width of 96 hardly change their input, so that a contrast of two such encoders hardly
    learns in some hundred steps.

    Args:
        module: any module; `apply` calls this function for all modules of a network.
        std: standard deviation, if it is another one.
    """
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5 if std is None else std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
