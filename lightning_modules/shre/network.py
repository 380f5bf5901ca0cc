"""SHRe's networks: an image encoder, a text encoder, and the encoder that both share (thesis, section on SHRe).

Shapes: B pairs, N image tokens (class token first), L text tokens ([CLS] first), D width, C classes.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.beit import Block as BeitBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from ..memory import recomputed
from ..networks.attention import set_vit_attention
from ..networks.bert import BertTrunk, bert_config, init_bert
from ..networks.mlp import LeanMlp

Shared = Literal["mlp", "mlp_in_order", "transformer"]
_EPS = 1e-6


class PostNormBlock(Block):
    """A ViT block whose norms come after the sums, as in Data2Vec 2.0; parameters are those of timm's block."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, D] to the same."""
        x = self.norm1(x + self.drop_path1(self.ls1(self.attn(x, attn_mask=attn_mask, is_causal=is_causal))))
        return self.norm2(x + self.drop_path2(self.ls2(self.mlp(x))))


def image_encoder(
    image_size: int, patch_size: int, width: int, layers: int, heads: int, post_norm: bool
) -> VisionTransformer:
    """Return a ViT that gives all its tokens, [B, 1 + N, D] with the class token first.

    Args:
        image_size: side of the images, pixels.
        patch_size: side of a patch, pixels.
        width: D.
        layers: number of blocks.
        heads: number of attention heads.
        post_norm: Data2Vec 2.0's kind: fixed sine-cosine positions of the patches alone, a norm before the blocks and
            in them after the sums, none behind. False is the usual ViT, as MAE and DINO train it.
    """
    encoder = VisionTransformer(
        img_size=image_size,
        patch_size=patch_size,
        embed_dim=width,
        depth=layers,
        num_heads=heads,
        num_classes=0,
        global_pool="",
        no_embed_class=post_norm,
        pre_norm=post_norm,
        final_norm=not post_norm,
        norm_layer=partial(nn.LayerNorm, eps=_EPS),
        block_fn=PostNormBlock if post_norm else Block,
        mlp_layer=LeanMlp,
    )
    if post_norm:
        # With a norm in front, timm leaves the patches' bias out; Data2Vec 2.0 has one.
        patches = encoder.patch_embed.proj
        encoder.patch_embed.proj = nn.Conv2d(3, width, patches.kernel_size, patches.stride)
        positions = build_sincos2d_pos_embed(list(encoder.patch_embed.grid_size), width, interleave_sin_cos=False)
        encoder.pos_embed = nn.Parameter(positions[None], requires_grad=False)
    return encoder


class TextEncoder(BertTrunk):
    """The embeddings and first layers of a BERT.

    Args:
        config: sizes and dropout; `num_hidden_layers` counts these layers.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, [BertLayer(config) for _ in range(config.num_hidden_layers)])
        self.apply(partial(init_bert, std=config.initializer_range))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, L] to states [B, L, D]."""
        return self.encode(input_ids, attention_mask)


class SharedMLP(nn.Module):
    """The shared encoder: h1 = W1 x, h2 = W2 LN(GELU(h1)), h3 = W3 LN(h2).

    Its results come as [h2, h1, h3], of widths (768, 3072, 1000) at the origin's sizes, in the order of the listing: as
    both losses treat the first two alike, that is the network that was trained, with 5,499,112 parameters. `in_order`
    makes the listing's widths those of three layers in a row instead, which nobody trained: h1 of 768, h2 of 3072.

    Args:
        width: D.
        classes: C.
        in_order: whether the widths are those in the listing's order.
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
        """Tokens [B, T, D], of which the first alone is read, to the three results [B, ...]."""
        h1 = self.fc1(tokens[:, 0])
        # What goes into the second product is computed again in the backward pass and not kept, as in `LeanMlp`.
        h2 = recomputed(self._second, h1)
        found = {"h1": h1, "h2": h2, "h3": self.head(self.norm2(h2))}
        return tuple(found[name] for name in self.widths)

    def layers_after(self, results: Collection[str]) -> list[nn.Module]:
        """The layers that none of these results comes from."""
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
    """The later shared encoder: one Transformer layer over all tokens, then a norm and the classifier.

    Its results come as [h2, h3]: the layer's first token [B, D], which alone is contrasted, and the logits. The layer
    is BEiT's: norms first, LayerScale from 0.2, keys without bias. 7,859,176 parameters at the origin's sizes.

    Args:
        width: D.
        heads: number of attention heads.
        classes: C.
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
        """Tokens [B, T, D], with the mask [B, T] of a text, to the two results [B, ...]."""
        hidden = None
        if attention_mask is not None:
            hidden = torch.zeros_like(attention_mask, dtype=tokens.dtype)
            hidden = hidden.masked_fill(attention_mask == 0, torch.finfo(tokens.dtype).min)[:, None, None, :]
        first = self.layer(tokens, shared_rel_pos_bias=hidden)[:, 0]
        return first, self.head(self.norm(first))

    def layers_after(self, results: Collection[str]) -> list[nn.Module]:
        """The layers that none of these results comes from."""
        return _after({"h2": [self.layer], "h3": [self.norm, self.head]}, results)


def _after(parts: Mapping[str, list[nn.Module]], results: Collection[str]) -> list[nn.Module]:
    """What comes after the last of some results; the parts make one result out of the one before, in their order."""
    names = list(parts)
    last = max(map(names.index, results))
    return [layer for name in names[last + 1 :] for layer in parts[name]]


def _init_linear(module: nn.Module) -> None:
    """N(0, 0.02) and no bias, as in the origin."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class SHReSizes(NamedTuple):
    """What a SHRe network is built from; the arguments of `SHReModule` say what they are."""

    image_size: int
    patch_size: int
    width: int
    heads: int
    image_layers: int
    text_layers: int
    post_norm: bool
    shared: Shared
    classes: int
    vocab_size: int
    max_tokens: int
    dropout: float


class SHReNetwork(nn.Module):
    """Both encoders and the shared one.

    Args:
        sizes: of everything.

    Attributes:
        widths: of the shared encoder's results, by name, in their order.

    Raises:
        ValueError: for sizes that do not fit together.
    """

    def __init__(self, sizes: SHReSizes) -> None:
        super().__init__()
        if sizes.width % sizes.heads:
            raise ValueError(f"A width of {sizes.width} does not divide into {sizes.heads} heads: change one of them.")
        if sizes.image_size % sizes.patch_size:
            raise ValueError(
                f"Images of {sizes.image_size} pixels do not divide into patches of {sizes.patch_size}: change one."
            )
        self.image_encoder = image_encoder(
            sizes.image_size, sizes.patch_size, sizes.width, sizes.image_layers, sizes.heads, sizes.post_norm
        )
        self.text_encoder = TextEncoder(
            bert_config(
                sizes.vocab_size,
                sizes.width,
                sizes.text_layers,
                sizes.heads,
                4 * sizes.width,
                max(sizes.max_tokens, 512),  # BERT's positions
                sizes.dropout,
                pad_token_id=0,
            )
        )
        self.shared_encoder: SharedMLP | SharedTransformer
        if sizes.shared == "transformer":
            self.shared_encoder = SharedTransformer(sizes.width, sizes.heads, sizes.classes)
        else:
            self.shared_encoder = SharedMLP(sizes.width, sizes.classes, in_order=sizes.shared == "mlp_in_order")
        self.widths = self.shared_encoder.widths

    def encode_image(self, image: Tensor) -> tuple[Tensor, ...]:
        """Images [B, 3, S, S] to the shared encoder's results, each [B, ...]."""
        set_vit_attention(self.image_encoder, image)
        return self.shared_encoder(self.image_encoder(image))

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Ids and mask [B, L] to the shared encoder's results, each [B, ...]."""
        return self.shared_encoder(self.text_encoder(input_ids, attention_mask), attention_mask)
