"""The auxiliary CLIP of TLEG, which MM-LG is compared with.

TLEG is Xia et al., "Transformer as Linear Expansion of Learngene".
"""

from collections.abc import Sequence

from torch import nn

from ...callbacks.learngene.layers import TOWERS, Layer, Tower
from ...callbacks.learngene.sizes import LearngeneSizes
from .network import Block, SummedCLIP
from .rules import TERMS, linear_layer


class LinearBlock(Block):
    """A term of TLEG's sums, layer norms included.

    Base and slope have the same initial distribution, as in TLEG's code, but CLIP's. TLEG's code draws all weights with
    a standard deviation of 0.02, with which towers of width 128 learn little.

    Args:
        width: token dimension.
        layers: number of layers of a tower.
        slope: whether the block is the slope, whose norms are initialized to zero.
    """

    def __init__(self, width: int, layers: int, slope: bool) -> None:
        super().__init__(width, layers)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if slope:
            nn.init.zeros_(self.norm1.weight)
            nn.init.zeros_(self.norm2.weight)


class LinearCLIP(SummedCLIP):
    """TLEG's auxiliary: layer i of n is base + i / n * slope, with two blocks for each tower.

    Args:
        sizes: of both towers.
    """

    method = "TLEG"

    def __init__(self, sizes: LearngeneSizes | None = None) -> None:
        super().__init__(sizes or LearngeneSizes())
        width, layers = self.sizes.width, self.sizes.layers
        self.blocks = nn.ModuleDict(
            {
                tower: nn.ModuleDict({term: LinearBlock(width, layers, term == "slope") for term in TERMS})
                for tower in TOWERS
            }
        )

    def layers_of(self, tower: Tower) -> Sequence[Layer]:
        """As in `SummedCLIP`: all layers differ."""
        tensors: Layer = dict(self.named_parameters())
        return [linear_layer(tensors, tower, layer, self.sizes.layers) for layer in range(self.sizes.layers)]
