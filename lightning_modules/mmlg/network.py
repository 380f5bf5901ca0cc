"""Auxiliary CLIPs that a learngene is extracted from, whose layers are sums of a few blocks: MM-LG's and TLEG's.

Shapes: B pairs, L tokens, V token dimension, E embedding dimension, S image size.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ...callbacks.distributed.collectives import full_tensor
from ...callbacks.learngene.layers import TOWERS, Layer, LearngeneTerms, Tower
from ...callbacks.learngene.sizes import NORMS, LearngeneSizes
from ..core.memory import in_slices
from ..networks.attention import attend
from .rules import GROUPS, OWNERS, TERMS, MethodName, group_of, layer_sum, linear_layer, number_of_pairs


class Block(nn.Module):
    """The weights and biases of a transformer layer's linear maps; a term of sums without a forward pass.

    Initialized as CLIP's text tower.

    Args:
        width: V.
        layers: number of layers of a tower, on which the initial weights of `proj` and `fc2` depend.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        output_std = (width * 2 * layers) ** -0.5
        stds = {self.qkv: width**-0.5, self.proj: output_std, self.fc1: (2 * width) ** -0.5, self.fc2: output_std}
        for linear, std in stds.items():
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)


class VisionEnds(nn.Module):
    """The vision tower without its layers."""

    def __init__(self, sizes: LearngeneSizes) -> None:
        super().__init__()
        width = sizes.width
        scale = width**-0.5
        patches = (sizes.image_size // sizes.patch_size) ** 2
        self.conv1 = nn.Conv2d(3, width, sizes.patch_size, sizes.patch_size, bias=False)
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        self.positional_embedding = nn.Parameter(scale * torch.randn(patches + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(scale * torch.randn(width, sizes.embed_dim))

    def embed(self, image: Tensor) -> Tensor:
        """Embed images [B, 3, S, S]: tokens [B, 1 + patches, V]."""
        patches = self.conv1(image).flatten(2).transpose(1, 2)
        class_token = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        tokens: Tensor = self.ln_pre(torch.cat([class_token, patches], 1) + self.positional_embedding.to(patches.dtype))
        return tokens

    def pool(self, tokens: Tensor) -> Tensor:
        """Project the class token of tokens [B, 1 + patches, V]: features [B, E]."""
        features: Tensor = self.ln_post(tokens[:, 0]) @ self.proj
        return features


class TextEnds(nn.Module):
    """The text tower without its layers."""

    def __init__(self, sizes: LearngeneSizes) -> None:
        super().__init__()
        width = sizes.width
        self.token_embedding = nn.Embedding(sizes.vocab_size, width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(sizes.max_tokens, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, sizes.embed_dim))
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed token ids, long [B, L]: tokens [B, L, V]."""
        tokens: Tensor = self.token_embedding(input_ids) + self.positional_embedding
        return tokens

    def pool(self, tokens: Tensor, input_ids: Tensor) -> Tensor:
        """Project the end-of-text token, whose id is the largest, of tokens [B, L, V]: features [B, E]."""
        last = tokens[torch.arange(len(tokens), device=tokens.device), input_ids.argmax(-1)]
        features: Tensor = self.ln_final(last) @ self.text_projection
        return features


class SummedLayer(nn.Module):
    """A transformer layer whose weights are arguments."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, tokens: Tensor, layer: Layer, mask: Tensor | None = None) -> Tensor:
        """Apply a layer to tokens [B, L, V]; the mask [L, L] is true where a token may attend."""
        tokens = tokens + self._attention(_norm(tokens, layer, "norm1"), layer, mask)
        hidden = F.gelu(F.linear(_norm(tokens, layer, "norm2"), layer["fc1.weight"], layer["fc1.bias"]))
        return tokens + F.linear(hidden, layer["fc2.weight"], layer["fc2.bias"])

    def _attention(self, tokens: Tensor, layer: Layer, mask: Tensor | None) -> Tensor:
        qkv = F.linear(tokens, layer["qkv.weight"], layer["qkv.bias"])
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, L, D]
        attended = attend(query, key, value, mask).transpose(1, 2).flatten(2)
        return F.linear(attended, layer["proj.weight"], layer["proj.bias"])


class SummedCLIP(nn.Module):
    """A CLIP of two towers whose layers are sums of stored blocks.

    Parameters have the names of the learngene's tensors. The sums are computed once per call. FSDP2 makes one group of
    all parameters, since every layer needs several blocks. A subclass registers the blocks and supplies `layers_of`.
    """

    method: MethodName
    sums_weights = True
    """Sharding gathers the parameters in float32, in which they are summed."""

    def __init__(self, sizes: LearngeneSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision = VisionEnds(sizes)
        self.text = TextEnds(sizes)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))
        self.layer = SummedLayer(sizes.heads)

    def compiled_parts(self) -> list[nn.Module]:
        """Return the module that `CompileCallback` compiles: the computation of every layer."""
        return [self.layer]

    def layers_of(self, tower: Tower) -> Sequence[Layer]:
        """Return the weights of a tower's layers, first to last; equal layers are the same object."""
        raise NotImplementedError

    def learngene_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a state dict that make up the learngene: all."""
        return state

    def encode_image(self, image: Tensor) -> Tensor:
        """Encode images [B, 3, S, S]: unnormalized features [B, E]."""
        return self._image_features(image, self._cast_layers("vision"))

    def encode_text(self, input_ids: Tensor) -> Tensor:
        """Encode texts [B, L]: unnormalized features [B, E]."""
        return self._text_features(input_ids, self._cast_layers("text"))

    def encode_pairs(self, image: Tensor, input_ids: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Encode images and texts from the same sums: unnormalized features [B, E] of both.

        Args:
            image: images [B, 3, S, S].
            input_ids: token ids, long [B, L].
            size: pairs in a slice, as in `in_slices`.
        """
        vision = self._cast_layers("vision")
        text = self._cast_layers("text")

        def encode(image: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
            return self._image_features(image, vision), self._text_features(input_ids, text)

        images, texts = in_slices(encode, size, image, input_ids)
        return images, texts

    def _cast_layers(self, tower: Tower) -> Sequence[Layer]:
        """Return a tower's layers in the autocast precision: autocast would copy a sum at each of its uses."""
        layers = self.layers_of(tower)
        device = self.logit_scale.device.type
        if not torch.is_autocast_enabled(device):
            return layers
        dtype = torch.get_autocast_dtype(device)
        cast = {
            id(layer): {name: weight if name.startswith("norm") else weight.to(dtype) for name, weight in layer.items()}
            for layer in layers
        }
        return [cast[id(layer)] for layer in layers]

    def _image_features(self, image: Tensor, layers: Sequence[Layer]) -> Tensor:
        return self.vision.pool(self._run(self.vision.embed(image), layers))

    def _text_features(self, input_ids: Tensor, layers: Sequence[Layer]) -> Tensor:
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        return self.text.pool(self._run(self.text.embed(input_ids), layers, causal), input_ids)

    def _run(self, tokens: Tensor, layers: Sequence[Layer], mask: Tensor | None = None) -> Tensor:
        for layer in layers:
            tokens = self.layer(tokens, layer, mask)
        return tokens


def _norm(tokens: Tensor, layer: Layer, name: str) -> Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:], layer[f"{name}.weight"], layer[f"{name}.bias"])


class LearngeneCLIP(SummedCLIP):
    """MM-LG's auxiliary: each pair of layers is one sum of a block of its tower and a block that both towers share.

    Each sum is computed once and used twice, so that autograd saves it once.

    Raises:
        UserError: If the number of layers is odd.
    """

    method = "MM-LG"

    def __init__(self, sizes: LearngeneSizes | None = None) -> None:
        super().__init__(sizes or LearngeneSizes())
        width = self.sizes.width
        layers = self.sizes.layers
        pairs = number_of_pairs(self.sizes)
        self.blocks = nn.ModuleDict(
            {owner: nn.ModuleDict({str(group): Block(width, layers) for group in GROUPS}) for owner in OWNERS}
        )
        names = [name for tower in TOWERS for name in (tower, f"{tower}_multimodal")]
        # The paper gives no initial value. With 1 / sqrt(2) the sum of two independent blocks has the variance of each.
        self.coefficients = nn.ParameterDict({name: nn.Parameter(torch.full((pairs,), 0.5**0.5)) for name in names})
        self.norms = nn.ModuleDict(
            {tower: nn.ModuleDict({name: nn.LayerNorm(width) for name in NORMS}) for tower in TOWERS}
        )

    def layers_of(self, tower: Tower) -> Sequence[Layer]:
        """Return the layers of `SummedCLIP`: P_i = c_k theta_j + c_k^m theta_j^m, each sum twice."""
        tensors: Layer = dict(self.named_parameters())
        norms = dict(self.norms.get_submodule(tower).named_parameters())
        sums = [norms | layer_sum(tensors, tower, pair) for pair in range(number_of_pairs(self.sizes))]
        return [layer for layer in sums for _ in range(2)]

    @torch.no_grad()
    def terms(self) -> LearngeneTerms:
        """Return the coefficients and the norms of the sums' terms; a collective call where parameters are sharded."""
        coefficients = {name: full_tensor(value.detach()).float() for name, value in self.coefficients.items()}
        block_norms = {
            (owner, int(group)): full_tensor(get_total_norm([value.detach().float() for value in block.parameters()]))
            for owner, groups in self.blocks.items()
            for group, block in groups.items()  # type: ignore[operator]
        }
        norms = {}
        for name, values in coefficients.items():
            owner = "multimodal" if name.endswith("multimodal") else name
            norms_of_blocks = torch.stack([block_norms[owner, group_of(pair)] for pair in range(len(values))])
            norms[name] = (values.abs() * norms_of_blocks).tolist()
        return LearngeneTerms({name: values.tolist() for name, values in coefficients.items()}, norms)


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
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        if slope:
            nn.init.zeros_(self.norm1.weight)
            nn.init.zeros_(self.norm2.weight)


class LinearCLIP(SummedCLIP):
    """TLEG's auxiliary: layer i of n is base + i / n * slope, with two blocks for each tower.

    TLEG is Xia et al., "Transformer as Linear Expansion of Learngene".
    """

    method = "TLEG"

    def __init__(self, sizes: LearngeneSizes | None = None) -> None:
        super().__init__(sizes or LearngeneSizes())
        width = self.sizes.width
        layers = self.sizes.layers
        self.blocks = nn.ModuleDict(
            {
                tower: nn.ModuleDict({term: LinearBlock(width, layers, term == "slope") for term in TERMS})
                for tower in TOWERS
            }
        )

    def layers_of(self, tower: Tower) -> Sequence[Layer]:
        """Return the layers of `SummedCLIP`, all of which differ."""
        tensors: Layer = dict(self.named_parameters())
        return [linear_layer(tensors, tower, layer, self.sizes.layers) for layer in range(self.sizes.layers)]
