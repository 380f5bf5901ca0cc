"""SHRe's networks: image encoder, text encoder and the shared encoder of both (thesis, section Transformer SHRe).

Shapes: B pairs, N image tokens (class token first), L text tokens ([CLS] first), width D, C classes.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Literal

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.beit import Block as BeitBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from ...common.errors import UserError
from ...common.sizes import check_heads, check_patches
from ..memory import in_slices, recomputed
from ..networks.attention import set_vit_attention
from ..networks.bert import BertTrunk, bert_config, init_bert
from ..networks.mlp import LeanMlp
from .settings import TextSettings, ViTSettings

Results = dict[str, Tensor]
"""Results of the shared encoder [B, ...] by name."""
Shared = Literal["mlp", "mlp_in_order", "transformer"]
_EPS = 1e-6
_BERT_POSITIONS = 512


class PostNormBlock(Block):
    """A ViT block of timm with norms after the residual sums, as in Data2Vec 2.0."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens [B, N, D] to the same shape."""
        x = self.norm1(x + self.drop_path1(self.ls1(self.attn(x, attn_mask=attn_mask, is_causal=is_causal))))
        return self.norm2(x + self.drop_path2(self.ls2(self.mlp(x))))


def image_encoder(vision: ViTSettings) -> VisionTransformer:
    """Return a ViT that outputs all tokens [B, 1 + N, D], the class token first.

    With `post_norm` it is Data2Vec 2.0's: fixed sine-cosine positions of the patches only, a norm before the blocks,
    norms after the sums in them, and none behind them. Without, it is the usual ViT, as trained by MAE and DINO.

    Raises:
        UserError: For sizes that do not fit together.
    """
    check_heads(vision.width, vision.heads)
    check_patches(vision.image_size, vision.patch_size)
    encoder = VisionTransformer(
        img_size=vision.image_size,
        patch_size=vision.patch_size,
        embed_dim=vision.width,
        depth=vision.depth,
        num_heads=vision.heads,
        num_classes=0,
        global_pool="",
        no_embed_class=vision.post_norm,
        pre_norm=vision.post_norm,
        final_norm=not vision.post_norm,
        norm_layer=partial(nn.LayerNorm, eps=_EPS),
        block_fn=PostNormBlock if vision.post_norm else Block,
        mlp_layer=LeanMlp,
    )
    if vision.post_norm:
        # timm omits the bias of the patch projection with a norm before the blocks; Data2Vec 2.0 has one.
        patches = encoder.patch_embed.proj
        encoder.patch_embed.proj = nn.Conv2d(3, vision.width, patches.kernel_size, patches.stride)
        grid = list(encoder.patch_embed.grid_size)
        positions = build_sincos2d_pos_embed(grid, vision.width, interleave_sin_cos=False)
        encoder.pos_embed = nn.Parameter(positions[None], requires_grad=False)
    return encoder


class TextEncoder(BertTrunk):
    """The embeddings and first layers of a BERT.

    Args:
        config: sizes and dropout; `num_hidden_layers` is the number of these layers.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, [BertLayer(config) for _ in range(config.num_hidden_layers)])
        self.apply(partial(init_bert, std=config.initializer_range))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map ids and mask [B, L] to states [B, L, D]."""
        return self.encode(input_ids, attention_mask)


class SharedMLP(nn.Module):
    """The shared encoder of the thesis: h1 = W1 x, h2 = W2 LN(GELU(h1)), h3 = W3 LN(h2).

    The results are [h2, h1, h3], whose widths (768, 3072, 1000) are in the order of listing 2 of September 2024; later
    revisions have (3072, 768, 1000). The losses treat the first two alike, so this is the network that the thesis
    trained, with 5,499,112 parameters.

    Args:
        width: width D of a token.
        classes: number of classes C.
        in_order: read the listing's widths as those of consecutive layers instead, h1 of 768 and h2 of 3072. (No such
            network was trained.)
    """

    def __init__(self, width: int, classes: int, in_order: bool = False) -> None:
        super().__init__()
        first, second = (width, 4 * width) if in_order else (4 * width, width)
        self.fc1 = nn.Linear(width, first)
        self.norm1 = nn.LayerNorm(first, eps=_EPS)
        self.fc2 = nn.Linear(first, second)
        self.norm2 = nn.LayerNorm(second, eps=_EPS)
        self.head = nn.Linear(second, classes)
        names = ("h1", "h2") if in_order else ("h2", "h1")
        self.widths = dict(zip((*names, "h3"), (width, 4 * width, classes), strict=True))
        self.contrasted = tuple(self.widths)
        self.apply(_init_linear)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Map the first of the tokens [B, T, D] to the three results [B, ...]."""
        h1 = self.fc1(tokens[:, 0])
        # The input of the second layer is recomputed in the backward pass, as in `LeanMlp`.
        h2 = recomputed(self._second, h1)
        found = {"h1": h1, "h2": h2, "h3": self.head(self.norm2(h2))}
        return tuple(found[name] for name in self.widths)

    def layers_after(self, results: Collection[str]) -> list[nn.Module]:
        """Return the layers that none of some results depends on."""
        parts: dict[str, list[nn.Module]] = {
            "h1": [self.fc1],
            "h2": [self.norm1, self.fc2],
            "h3": [self.norm2, self.head],
        }
        return _after(parts, results)

    def _second(self, h1: Tensor) -> Tensor:
        second: Tensor = self.fc2(self.norm1(nn.functional.gelu(h1)))
        return second


class SharedTransformer(nn.Module):
    """The later shared encoder: one Transformer layer over all tokens, a norm and a classifier.

    The results are [h2, h3]: the first token after the layer [B, D], which is contrasted, and the logits. The layer is
    BEiT's: pre-norm, LayerScale initialised with 0.2, keys without bias. 7,859,176 parameters at the thesis' sizes.

    Args:
        width: width D of a token.
        heads: number of attention heads.
        classes: number of classes C.
    """

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=_EPS)
        self.layer = BeitBlock(width, heads, qkv_bias=True, init_values=0.2, norm_layer=norm)
        self.norm = norm(width)
        self.head = nn.Linear(width, classes)
        self.widths = {"h2": width, "h3": classes}
        self.contrasted: tuple[str, ...] = ("h2",)
        self.apply(_init_linear)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Map tokens [B, T, D], with the mask [B, T] of a text, to the two results [B, ...]."""
        hidden = None
        if attention_mask is not None:
            hidden = torch.zeros_like(attention_mask, dtype=tokens.dtype)
            hidden = hidden.masked_fill(attention_mask == 0, torch.finfo(tokens.dtype).min)[:, None, None, :]
        first = self.layer(tokens, shared_rel_pos_bias=hidden)[:, 0]
        return first, self.head(self.norm(first))

    def layers_after(self, results: Collection[str]) -> list[nn.Module]:
        """Return the layers that none of some results depends on."""
        return _after({"h2": [self.layer], "h3": [self.norm, self.head]}, results)


def _after(parts: Mapping[str, list[nn.Module]], results: Collection[str]) -> list[nn.Module]:
    """Return the layers behind the last of some results, of consecutive layers by the result that they compute."""
    names = list(parts)
    last = max(map(names.index, results))
    return [layer for name in names[last + 1 :] for layer in parts[name]]


def _init_linear(module: nn.Module) -> None:
    """Initialise weights from N(0, 0.02) and biases with zeros, as in the thesis."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class SHReNetwork(nn.Module):
    """Image encoder, text encoder and shared encoder.

    Args:
        classes: number of classes C.
        shared: kind of the shared encoder.
        vision: settings of the image encoder; width and heads of all three encoders.
        text: settings of the text encoder.

    Attributes:
        widths: width of each result of the shared encoder, by name, in the order of the results.

    Raises:
        UserError: For sizes that do not fit together.
    """

    def __init__(self, classes: int, shared: Shared, vision: ViTSettings, text: TextSettings) -> None:
        super().__init__()
        width, heads = vision.width, vision.heads
        self.max_tokens = text.max_tokens
        self.image_encoder = image_encoder(vision)
        positions = max(text.max_tokens, _BERT_POSITIONS)
        self.text_encoder = TextEncoder(
            bert_config(text.vocab_size, width, text.depth, heads, 4 * width, positions, text.dropout, pad_token_id=0)
        )
        self.shared_encoder: SharedMLP | SharedTransformer
        if shared == "transformer":
            self.shared_encoder = SharedTransformer(width, heads, classes)
        else:
            self.shared_encoder = SharedMLP(width, classes, in_order=shared == "mlp_in_order")
        self.widths = self.shared_encoder.widths

    def encode_image(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map images [B, 3, S, S] to the shared encoder's results, each [B, ...]."""
        set_vit_attention(self.image_encoder, image)
        return self.shared_encoder(self.image_encoder(image))

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Map ids and mask [B, L] to the shared encoder's results, each [B, ...].

        Raises:
            UserError: If the captions are longer than `max_tokens`.
        """
        if input_ids.shape[1] > self.max_tokens:
            raise UserError(
                f"Expected captions of at most {self.max_tokens} tokens, got {input_ids.shape[1]}: set data.max_tokens."
            )
        return self.shared_encoder(self.text_encoder(input_ids, attention_mask), attention_mask)


def encode_pairs(
    network: SHReNetwork, image: Tensor, input_ids: Tensor, attention_mask: Tensor, size: int | None
) -> tuple[Results, Results]:
    """Encode images and captions.

    Args:
        network: the network.
        image: images [B, 3, S, S].
        input_ids: token ids of the captions [B, L].
        attention_mask: their mask [B, L].
        size: pairs at a time, with activations recomputed in the backward pass; None encodes all at once.

    Returns:
        Results of the images and of the captions.
    """

    def encode(image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return *network.encode_image(image), *network.encode_text(input_ids, attention_mask)

    found = in_slices(encode, size, image, input_ids, attention_mask)
    names = list(network.widths)
    return dict(zip(names, found[: len(names)], strict=True)), dict(zip(names, found[len(names) :], strict=True))
