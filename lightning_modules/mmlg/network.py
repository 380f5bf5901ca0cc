"""The networks that learngenes are extracted from, whose layers are sums of a few blocks.

They are the auxiliary CLIP (section 3.2 of the paper), and what TLEG, with which it is compared, has in its place.

Shapes: B pairs, L tokens, V values of a token, E of a feature.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...callbacks.learngene.file import LearngeneSizes
from ...callbacks.learngene.layers import (
    GROUPS,
    KINDS,
    NORMS,
    TERMS,
    TOWERS,
    Layer,
    Method,
    Tower,
    layer_weights,
    linear_layer,
)
from ..memory import in_slices
from ..networks.attention import attend


class Block(nn.Module):
    """The linear maps of a transformer layer, weights and biases; it is a term of sums, and never runs by itself.

    Args:
        width: V.
        layers: of a tower, which the initial weights of `proj` depend on.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        # As CLIP starts its text tower.
        inwards, outwards = width**-0.5, (width * 2 * layers) ** -0.5
        stds = {self.qkv: inwards, self.proj: outwards, self.fc1: (2 * width) ** -0.5, self.fc2: outwards}
        for linear, std in stds.items():
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)


class VisionEnds(nn.Module):
    """What the vision tower has before and after its layers."""

    def __init__(self, sizes: LearngeneSizes) -> None:
        super().__init__()
        width, scale = sizes.width, sizes.width**-0.5
        patches = (sizes.image_size // sizes.patch_size) ** 2
        self.conv1 = nn.Conv2d(3, width, sizes.patch_size, sizes.patch_size, bias=False)
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        self.positional_embedding = nn.Parameter(scale * torch.randn(patches + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(scale * torch.randn(width, sizes.embed_dim))

    def embed(self, image: Tensor) -> Tensor:
        """[B, 3, S, S] to tokens [B, 1 + patches, V]."""
        patches = self.conv1(image).flatten(2).transpose(1, 2)
        first = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        tokens: Tensor = self.ln_pre(torch.cat([first, patches], 1) + self.positional_embedding.to(patches.dtype))
        return tokens

    def pool(self, tokens: Tensor) -> Tensor:
        """[B, 1 + patches, V] to features [B, E] of the class token."""
        features: Tensor = self.ln_post(tokens[:, 0]) @ self.proj
        return features


class TextEnds(nn.Module):
    """What the text tower has before and after its layers."""

    def __init__(self, sizes: LearngeneSizes) -> None:
        super().__init__()
        width = sizes.width
        self.token_embedding = nn.Embedding(sizes.vocab_size, width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(sizes.max_tokens, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, sizes.embed_dim))
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Long [B, L] to tokens [B, L, V]."""
        tokens: Tensor = self.token_embedding(input_ids) + self.positional_embedding
        return tokens

    def pool(self, tokens: Tensor, input_ids: Tensor) -> Tensor:
        """[B, L, V] to features [B, E] of the end of the text, whose id is the largest."""
        last = tokens[torch.arange(len(tokens), device=tokens.device), input_ids.argmax(-1)]
        features: Tensor = self.ln_final(last) @ self.text_projection
        return features


class SummedCLIP(nn.Module):
    """A CLIP of two towers whose layers are sums of stored blocks: its parameters are named as in the learngene's file.

    The sums are made once a call. FSDP2 makes one group of all parameters, since every layer needs several blocks:
    there is no list of blocks. A subclass registers them and supplies `layers_of`.

    Args:
        sizes: of both towers.
    """

    method: Method
    sums_weights = True  # in float32: to be gathered so

    def __init__(self, sizes: LearngeneSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision = VisionEnds(sizes)
        self.text = TextEnds(sizes)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))

    def layers_of(self, tower: Tower) -> list[Layer]:
        """The weights of a tower's layers, from first to last; equal layers are the same object."""
        raise NotImplementedError

    def learngene_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of the state dict belongs into a learngene's file: all."""
        return state

    def encode_image(self, image: Tensor) -> Tensor:
        """Features [B, E], not normalised, of images [B, 3, S, S]."""
        return self._image_features(image, self._computed_in("vision"))

    def encode_text(self, input_ids: Tensor) -> Tensor:
        """Features [B, E], not normalised, of texts [B, L]."""
        return self._text_features(input_ids, self._computed_in("text"))

    def encode_pairs(self, image: Tensor, input_ids: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Both at once, from the same sums.

        Args:
            image: [B, 3, S, S].
            input_ids: long [B, L].
            size: pairs that go through the towers at a time, as in `in_slices`.
        """
        vision, text = self._computed_in("vision"), self._computed_in("text")

        def encode(image: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
            return self._image_features(image, vision), self._text_features(input_ids, text)

        images, texts = in_slices(encode, size, image, input_ids)
        return images, texts

    def _computed_in(self, tower: Tower) -> list[Layer]:
        """A tower's layers in the precision that they are multiplied in: else each use would make its own copy."""
        layers, device = self.layers_of(tower), self.logit_scale.device.type
        if not torch.is_autocast_enabled(device):
            return layers
        kind = torch.get_autocast_dtype(device)
        cast = {
            id(layer): {name: weight if name.startswith("norm") else weight.to(kind) for name, weight in layer.items()}
            for layer in layers
        }
        return [cast[id(layer)] for layer in layers]

    def _image_features(self, image: Tensor, layers: list[Layer]) -> Tensor:
        return self.vision.pool(self._run(self.vision.embed(image), layers))

    def _text_features(self, input_ids: Tensor, layers: list[Layer]) -> Tensor:
        length = input_ids.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        return self.text.pool(self._run(self.text.embed(input_ids), layers, earlier), input_ids)

    def _run(self, tokens: Tensor, layers: list[Layer], mask: Tensor | None = None) -> Tensor:
        for layer in layers:
            tokens = tokens + self._attention(_normed(tokens, layer, "norm1"), layer, mask)
            hidden = F.gelu(F.linear(_normed(tokens, layer, "norm2"), layer["fc1.weight"], layer["fc1.bias"]))
            tokens = tokens + F.linear(hidden, layer["fc2.weight"], layer["fc2.bias"])
        return tokens

    def _attention(self, tokens: Tensor, layer: Layer, mask: Tensor | None) -> Tensor:
        qkv = F.linear(tokens, layer["qkv.weight"], layer["qkv.bias"])
        query, key, value = qkv.unflatten(-1, (3, self.sizes.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, L, D]
        found = attend(query, key, value, mask).transpose(1, 2).flatten(2)
        return F.linear(found, layer["proj.weight"], layer["proj.bias"])


def _normed(tokens: Tensor, layer: Layer, name: str) -> Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:], layer[f"{name}.weight"], layer[f"{name}.bias"])


class LearngeneCLIP(SummedCLIP):
    """MM-LG's auxiliary: two consecutive layers are one sum of a block of their tower and one that both towers share.

    Of each tower there are half as many distinct layers as layers. They are summed once and used twice each, so that
    autograd keeps each of them once.

    Args:
        sizes: of both towers.

    Raises:
        ValueError: if the number of layers is odd.
    """

    method = "MM-LG"

    def __init__(self, sizes: LearngeneSizes | None = None) -> None:
        super().__init__(sizes or LearngeneSizes())
        width, layers, pairs = self.sizes.width, self.sizes.layers, self.sizes.pairs
        self.blocks = nn.ModuleDict(
            {kind: nn.ModuleDict({str(group): Block(width, layers) for group in GROUPS}) for kind in KINDS}
        )
        names = [name for tower in TOWERS for name in (tower, f"{tower}_multimodal")]
        # The sum of two independent blocks then has the variance of each.
        self.coefficients = nn.ParameterDict({name: nn.Parameter(torch.full((pairs,), 0.5**0.5)) for name in names})
        self.norms = nn.ModuleDict(
            {tower: nn.ModuleDict({name: nn.LayerNorm(width) for name in NORMS}) for tower in TOWERS}
        )

    def layers_of(self, tower: Tower) -> list[Layer]:
        """As in `SummedCLIP`: each sum twice."""
        tensors: Layer = dict(self.named_parameters())
        norms = dict(self.norms.get_submodule(tower).named_parameters())
        sums = [norms | layer_weights(tensors, tower, pair) for pair in range(self.sizes.pairs)]
        return [layer for layer in sums for _ in range(2)]


class LinearBlock(Block):
    """A term of TLEG's sums, which the norms are part of.

    Base and slope start alike, as in TLEG's code, but from CLIP's weights. That code draws all with a deviation of
    0.02, which suits its widths: towers of width 128 that start so learn little (the README has both).

    Args:
        width: V.
        layers: of a tower.
        slope: whether it is the slope, whose norms start at zero.
    """

    def __init__(self, width: int, layers: int, slope: bool) -> None:
        super().__init__(width, layers)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if slope:
            nn.init.zeros_(self.norm1.weight)
            nn.init.zeros_(self.norm2.weight)


class LinearCLIP(SummedCLIP):
    """TLEG, for comparison: layer i of n is base + i/n * slope, with two blocks in each tower.

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

    def layers_of(self, tower: Tower) -> list[Layer]:
        """As in `SummedCLIP`: all different."""
        tensors: Layer = dict(self.named_parameters())
        return [linear_layer(tensors, tower, layer, self.sizes.layers) for layer in range(self.sizes.layers)]
