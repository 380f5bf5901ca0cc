"""ClipCap's mapper (Mokady et al., arXiv 2111.09734) from an image embedding to a prefix for a language model.

Shapes: B images, L tokens, D embedding dimension, P tokens of the prefix, W token dimension of the language model.
"""

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from ...common.sizes import check_heads
from ..networks.attention import attend
from .settings import MapperSettings


class MapperBlock(nn.Module):
    """A pre-norm transformer block without biases on query, key and value.

    Args:
        width: token dimension.
        heads: number of attention heads.
        mlp_ratio: hidden dimension of the MLP over the width.
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
        """Transform tokens [B, L, W]."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CaptionMapper(nn.Module):
    """A transformer over tokens projected from the embedding, and learned tokens, whose outputs are the prefix.

    Args:
        embed_dim: embedding dimension D.
        sizes: of the mapper.

    Raises:
        UserError: If the heads do not divide the width, or a number is below 1.
    """

    def __init__(self, embed_dim: int, sizes: MapperSettings = MapperSettings()) -> None:
        super().__init__()
        check_heads(sizes.width, sizes.heads)
        self.clip_length = sizes.clip_length
        self.spread = nn.Linear(embed_dim, sizes.clip_length * sizes.width)
        self.prefix = nn.Parameter(torch.randn(sizes.prefix_length, sizes.width))
        self.blocks = nn.ModuleList(
            [MapperBlock(sizes.width, sizes.heads, sizes.mlp_ratio) for _ in range(sizes.depth)]
        )

    def forward(self, embedding: Tensor) -> Tensor:
        """Map embeddings [B, D] to prefixes [B, P, W]."""
        spread = self.spread(embedding).unflatten(-1, (self.clip_length, -1))
        x = torch.cat([spread, self.prefix.to(spread.dtype).expand(len(spread), -1, -1)], 1)
        for block in self.blocks:
            x = block(x)
        return x[:, self.clip_length :]
