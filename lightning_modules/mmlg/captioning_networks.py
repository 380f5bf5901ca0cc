"""Networks of captioning: ClipCap's mapper from an image embedding to a prefix, and the frozen language model.

ClipCap is Mokady et al., arXiv 2111.09734.

Shapes: B images, L tokens, D embedding dimension, P tokens of the prefix, W token dimension of the language model.
"""

from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...common.errors import UserError
from ...common.ranges import check_heads
from ..networks.attention import attend
from .settings import GenerationSettings, MapperSettings


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


def load_language_model(name: str, mapper: MapperSettings, generation: GenerationSettings) -> tuple[Any, Any]:
    """Load a causal language model of the transformers library, in eval mode and float32, and its tokenizer.

    Args:
        name: name on the hub, or a folder.
        mapper: the mapper that makes its prefix.
        generation: the captions that it writes.

    Raises:
        UserError: If the language model is not found, is not causal, or does not fit the mapper.
    """
    network = _from_hub(AutoModelForCausalLM, name, dtype=torch.float32)
    tokenizer = _from_hub(AutoTokenizer, name)
    width = network.get_input_embeddings().weight.shape[1]
    if width != mapper.width:
        raise UserError(
            f"Expected mapper.width {width}, the token dimension of {name!r}, got {mapper.width}: set "
            "model.mapper.width to the former."
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"Expected an end-of-text token in the tokenizer of {name!r}, got none: give another model.")
    length = mapper.prefix_length + generation.max_new_tokens
    positions = getattr(network.config, "max_position_embeddings", length)
    if length > positions:
        raise UserError(
            f"Expected a prefix and a caption of at most {positions} tokens, the positions of {name!r}, got "
            f"mapper.prefix_length {mapper.prefix_length} and generation.max_new_tokens {generation.max_new_tokens}: "
            "lower one of them."
        )
    return network.requires_grad_(False).eval(), tokenizer


def _from_hub(auto_class: Any, name: str, **options: Any) -> Any:
    try:
        # Without the argument, transformers asks on the terminal whether to run the Python files of a model.
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
    except OSError as error:
        raise UserError(
            f"Expected a language model on the hub, or a folder with a network and its tokenizer, found none at "
            f"{name!r}: correct the name, or download it."
        ) from error
    except ValueError as error:
        raise UserError(
            f"Expected a causal language model of the transformers library with its tokenizer, such as gpt2, got "
            f"something else at {name!r}: give another one."
        ) from error
