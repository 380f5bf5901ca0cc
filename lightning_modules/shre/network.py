"""SHRe's networks: image encoder, text encoder, and with the shared encoder the whole (thesis, Transformer SHRe).

Shapes: B pairs, N image tokens (class token first), L text tokens ([CLS] first), width D, C classes.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import timm
from lightning.pytorch.utilities import rank_zero_info
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from ...common.errors import UserError
from ...common.ranges import check_heads, check_patches
from ..core.fitting import load_fitting
from ..core.memory import LeanMlp, in_slices, kept_statistics, one_update
from ..networks.attention import set_vit_attention
from ..networks.bert import BertTrunk, bert_config, init_bert
from ..networks.clip.text_encoder import reading_encoder
from ..networks.initial import init_linear
from ..networks.vit import load_vision_weights
from .settings import TextSettings, VisionSettings, ViTSettings
from .shared import Shared, SharedMLP, SharedTransformer, SMKETransformer

# Named encoders are open_clip's, which others do without.
if TYPE_CHECKING:
    from .towers import NamedImageEncoder, NamedTextEncoder

Results = dict[str, Tensor]
"""Results of the shared encoder [B, ...] by name."""
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
    encoder.blocks.apply(init_linear)
    if vision.post_norm:
        # timm omits the bias of the patch projection with a norm before the blocks; Data2Vec 2.0 has one.
        patches = encoder.patch_embed.proj
        encoder.patch_embed.proj = nn.Conv2d(3, vision.width, patches.kernel_size, patches.stride)
        grid = list(encoder.patch_embed.grid_size)
        positions = build_sincos2d_pos_embed(grid, vision.width, interleave_sin_cos=False)
        encoder.pos_embed = nn.Parameter(positions[None], requires_grad=False)
    return encoder


def timm_transformer(name: str, option: str, **arguments: Any) -> Any:
    """Build a vision transformer of timm without a head.

    Args:
        name: name of timm's model, with the tag of its weights if they are downloaded.
        option: option that names the model, for messages.
        **arguments: further arguments of `timm.create_model`.

    Raises:
        UserError: If there is no such model, or it does not have exactly one token before the patches.
    """
    try:
        network = timm.create_model(name, num_classes=0, **arguments)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise UserError(
            f"Expected a vision transformer of timm as {option}, got {name!r} ({error}): name another."
        ) from error
    prefix_tokens = getattr(network, "num_prefix_tokens", int(hasattr(network, "cls_token")))
    if prefix_tokens != 1:
        raise UserError(
            f"Expected a vision transformer with one token before the patches, the class token, as {option}, got "
            f"{name!r} with {prefix_tokens}: name another."
        )
    return network


class TextEncoder(BertTrunk):
    """The embeddings and first layers of a BERT.

    Args:
        config: sizes and dropout; `num_hidden_layers` is the number of these layers.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, [BertLayer(config) for _ in range(config.num_hidden_layers)])
        self.apply(init_bert)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map ids and mask [B, L] to states [B, L, D]."""
        return self.encode(input_ids, attention_mask)


def text_encoder(text: TextSettings, width: int, heads: int) -> TextEncoder | NamedTextEncoder:
    """Return the text encoder of settings, whose tokens have a width and whose layers, without a name, some heads."""
    if text.name is not None:
        from .towers import NamedTextEncoder

        return NamedTextEncoder(text, width)
    positions = max(text.max_tokens, _BERT_POSITIONS)
    return TextEncoder(
        bert_config(text.vocab_size, width, text.depth, heads, 4 * width, positions, text.dropout, text.pad_token_id)
    )


class SHReNetwork(nn.Module):
    """Image encoder, text encoder and shared encoder.

    Args:
        classes: number of classes C.
        shared: name of the shared encoder.
        vision: settings of the image encoder; width and heads of all three encoders.
        text: settings of the text encoder.

    Attributes:
        widths: width of each result of the shared encoder, by name, in the order of the results.

    Raises:
        UserError: For sizes that do not fit together.
    """

    def __init__(self, classes: int, shared: Shared, vision: ViTSettings, text: TextSettings) -> None:
        super().__init__()
        width = vision.width
        heads = vision.heads
        self.max_tokens = text.max_tokens
        self.image_encoder: VisionTransformer | NamedImageEncoder
        if isinstance(vision, VisionSettings) and vision.name is not None:
            from .towers import NamedImageEncoder

            check_heads(width, heads)
            self.image_encoder = NamedImageEncoder(vision.name, width, vision.image_size)
        else:
            self.image_encoder = image_encoder(vision)
        self.text_encoder = text_encoder(text, width, heads)
        self.shared_encoder: SharedMLP | SharedTransformer
        if shared in ("transformer", "s_smke"):
            transformer = SharedTransformer if shared == "transformer" else SMKETransformer
            self.shared_encoder = transformer(width, heads, classes)
        else:
            self.shared_encoder = SharedMLP(width, classes, in_order=shared == "mlp_in_order")
        self.widths = self.shared_encoder.widths

    def encode_image(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map images [B, 3, S, S] to the shared encoder's results, each [B, ...]."""
        if isinstance(self.image_encoder, VisionTransformer):
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

    one_step: AbstractContextManager[None] = nullcontext() if size is None else one_update(network)
    with one_step:
        results = in_slices(encode, size, image, input_ids, attention_mask, again=lambda: kept_statistics(network))
    names = list(network.widths)
    images = dict(zip(names, results[: len(names)], strict=True))
    texts = dict(zip(names, results[len(names) :], strict=True))
    return images, texts


def load_encoders(network: SHReNetwork, vision: VisionSettings, text: TextSettings) -> None:
    """Load the encoders' weights, and log their sources.

    Args:
        network: network to fill.
        vision: settings of the image encoder.
        text: settings of the text encoder.

    Raises:
        UserError: If a source is of another kind or size; the message lists the keys that do not fit.
    """
    image_source = "image encoder random"
    text_source = "text encoder random"
    if not isinstance(network.image_encoder, VisionTransformer):
        from .towers import load_named_image

        image_source = load_named_image(network.image_encoder, vision)
    elif vision.weights is not None:
        image_source = load_vision_weights(network.image_encoder, vision.weights, first_blocks=True)
    if not isinstance(network.text_encoder, TextEncoder):
        from .towers import load_named_text

        text_source = load_named_text(network.text_encoder, text)
    elif text.weights is not None:
        text_source = _load_bert(network.text_encoder, text.weights)
    rank_zero_info(f"Initial weights: {image_source}; {text_source}; shared encoder random.")


def _load_bert(encoder: TextEncoder, source: str) -> str:
    """Fill a text encoder with the first layers of a BERT, and return a description of the source."""
    layers = len(encoder.encoder["layer"])
    with reading_encoder(source) as folder_or_name:
        state = BertModel.from_pretrained(folder_or_name, add_pooling_layer=False).state_dict()
    state = {key: value for key, value in state.items() if _layer_of(key) < layers}
    load_fitting(encoder, state, f"the text encoder from {source!r}")
    return f"text encoder from {source!r}, its first {layers} layers"


def _layer_of(key: str) -> int:
    layer = re.match(r"encoder\.layer\.(\d+)\.", key)
    return int(layer[1]) if layer else -1
