"""The MLP of a transformer block, without its largest activation in memory."""

from timm.layers import Mlp
from torch import Tensor

from .memory import recomputed


class LeanMlp(Mlp):
    """timm's MLP, which keeps the hidden states only before the activation function, not after it.

    A matrix product keeps its input for the backward pass: four times the width of a block, a quarter of what a ViT
    block keeps. Here the activation function is recomputed instead, about one percent of a block's work; the product is
    not, because recomputation ends as soon as all saved tensors exist.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., V] to [..., V]."""
        return recomputed(self._second_half, self.fc1(x))

    def _second_half(self, hidden: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(hidden)))))
