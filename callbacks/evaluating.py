"""What callbacks use to look at a module beside its training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards each part has its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def features_of(trainer: Trainer, encode: Callable[[Tensor], Any], image: Tensor) -> Tensor:
    """Returns what a module's method makes of images, in the trainer's precision.

    Args:
        trainer: Says what that is.
        encode: A method that returns features, or a tuple that starts with them.
        image: Images [B, 3, H, W], on the module's device.
    """
    with trainer.precision_plugin.forward_context():
        features = encode(trainer.precision_plugin.convert_input(image))
    found: Tensor = features[0] if isinstance(features, tuple) else features
    return found
