"""ClipCap's mapper (Mokady et al., arXiv 2111.09734): an embedding of an image to words that a language model reads.

Shapes: B images, D width of their embeddings, W width of a word.
"""

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from ..networks.attention import attend


class MapperBlock(nn.Module):
    """A pre-norm transformer block without biases on query, key and value.

    Args:
        width: of a token.
        heads: number of attention heads.
        mlp_ratio: hidden width of the MLP, in widths.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] to [B, L, W]."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CaptionMapper(nn.Module):
    """A transformer over the embedding, spread over some positions, and learned constants, which become the prefix.

    Args:
        embed_dim: D.
        width: W.
        prefix_length: words that the language model gets.
        clip_length: positions that the embedding is spread over.
        layers: of the transformer.
        heads: of its attention.
        mlp_ratio: of its MLPs.

    Raises:
        ValueError: if the heads do not divide the width, or a number is below 1.
    """

    def __init__(
        self,
        embed_dim: int,
        width: int,
        prefix_length: int = 10,
        clip_length: int = 10,
        layers: int = 8,
        heads: int = 8,
        mlp_ratio: float = 2.0,
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "prefix_length": prefix_length, "clip_length": clip_length, "layers": layers}
        for name, value in (sizes | {"heads": heads}).items():
            if value < 1:
                raise ValueError(f"Found {name}={value}, expected a number from 1 on.")
        if width % heads:
            raise ValueError(f"Found heads={heads}, expected a number that divides {width}, the width of a word.")
        self.clip_length = clip_length
        self.spread = nn.Linear(embed_dim, clip_length * width)
        self.prefix = nn.Parameter(torch.randn(prefix_length, width))
        self.blocks = nn.ModuleList([MapperBlock(width, heads, mlp_ratio) for _ in range(layers)])

    def forward(self, embedding: Tensor) -> Tensor:
        """[B, D] to [B, prefix_length, W]."""
        spread = self.spread(embedding).unflatten(-1, (self.clip_length, -1))
        x = torch.cat([spread, self.prefix.to(spread.dtype).expand(len(spread), -1, -1)], 1)
        for block in self.blocks:
            x = block(x)
        return x[:, self.clip_length :]
