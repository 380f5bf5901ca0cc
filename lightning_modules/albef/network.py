"""ALBEF's networks: an image encoder, and one BERT whose upper half attends to the image (section 3.1 of the paper).

Submodules have the authors' names, so that their checkpoints map to this network key by key.

Shapes: B images, R texts, N image tokens (CLS first), L text tokens (CLS first), D text width, V image width, E
embedding dimension, H heads.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertIntermediate,
    BertLayer,
    BertOnlyMLMHead,
    BertOutput,
    BertSelfOutput,
)

from ..core.memory import LeanMlp, in_slices, recomputed
from ..core.precision import at_least_float32, unit
from ..evaluation.protocol import Batch
from ..networks.attention import attend, set_vit_attention
from ..networks.bert import BertTrunk, bert_config, init_bert, resize_rows
from ..networks.initial import init_linear
from ..networks.vit import named_vit
from .settings import TextSettings, VisionSettings


class CrossAttention(nn.Module):
    """Attention of text states over image tokens, followed by the residual and LayerNorm of BERT.

    Args:
        config: BERT sizes and dropout.
        image_width: width V of the image tokens.
    """

    def __init__(self, config: BertConfig, image_width: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.self = nn.ModuleDict(
            {
                "query": nn.Linear(width, width),
                "key": nn.Linear(image_width, width),
                "value": nn.Linear(image_width, width),
            }
        )
        self.output = BertSelfOutput(config)

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, L, D] -> [B, H, L, D/H]

    def forward(
        self, states: Tensor, image_tokens: Tensor, image_index: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        """Compute cross-attention of every text to its image; keys and values are projected once for each image.

        Args:
            states: [R, L, D]. The first R - G rows are K batches of B texts, of which row b attends to image b.
            image_tokens: [B, N, V].
            image_index: [G], the image that each of the last G rows attends to. None means G = 0.
            visible: boolean [B, N], false for padding among the image tokens; None without padding.

        Returns:
            [R, L, D].
        """
        images = image_tokens.shape[0]
        gathered = 0 if image_index is None else image_index.shape[0]
        aligned = states.shape[0] - gathered
        length = states.shape[1]
        query = self.self["query"](states)
        key = self._split(self.self["key"](image_tokens))
        value = self._split(self.self["value"](image_tokens))
        dropout = self.dropout if self.training else 0.0
        mask = None if visible is None else visible[:, None, None]

        contexts = []
        if aligned or image_index is None:
            # Queries do not interact in cross-attention, so the K texts of an image attend as one long text, without
            # copies of the keys and values.
            together = query[:aligned].unflatten(0, (-1, images)).transpose(0, 1).flatten(1, 2)  # [B, K*L, D]
            context = attend(self._split(together), key, value, mask, dropout).transpose(1, 2).flatten(2)
            contexts.append(context.unflatten(1, (-1, length)).transpose(0, 1).flatten(0, 1))  # [K*B, L, D]
        if image_index is not None:

            def attend_apart(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                row_mask = None if mask is None else mask[image_index]
                return attend(query, key[image_index], value[image_index], row_mask, dropout)

            # Recomputed, so that the copies of keys and values are not held until the backward pass.
            gathered_context = recomputed(attend_apart, self._split(query[aligned:]), key, value)
            contexts.append(gathered_context.transpose(1, 2).flatten(2))
        context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
        return self.output(context, states)


class FusionLayer(nn.Module):
    """A BERT layer with cross-attention between self-attention and feed-forward network (all post-norm)."""

    def __init__(self, config: BertConfig, image_width: int) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.crossattention = CrossAttention(config, image_width)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(
        self,
        states: Tensor,
        mask: Tensor,
        image_tokens: Tensor,
        image_index: Tensor | None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Run the layer; arguments as in `CrossAttention.forward`, with the boolean text mask [R, 1, 1 or L, L]."""
        states, _ = self.attention(states, mask)
        states = self.crossattention(states, image_tokens, image_index, visible)
        # As in `LeanMlp`, the input of the second product is recomputed and not kept.
        transformed = recomputed(self._second_product, self.intermediate.dense(states))
        return self.output.LayerNorm(self.output.dropout(transformed) + states)

    def _second_product(self, hidden: Tensor) -> Tensor:
        return self.output.dense(self.intermediate.intermediate_act_fn(hidden))


class FusionBert(nn.Module):
    """BERT for masked language modeling, split into text layers and, above them, fusion layers with cross-attention.

    Args:
        config: BERT sizes; `num_hidden_layers` counts text and fusion layers together.
        fusion_layer: index of the first layer with cross-attention.
        image_width: width V of the image tokens.
        language_head: whether there is a head for masked language modeling.
        fusion: builds a layer with cross-attention from the sizes and the image width.
    """

    def __init__(
        self,
        config: BertConfig,
        fusion_layer: int,
        image_width: int,
        language_head: bool = True,
        fusion: Callable[[BertConfig, int], nn.Module] = FusionLayer,
    ) -> None:
        super().__init__()
        self.fusion_layer = fusion_layer
        layers = [
            BertLayer(config) if index < fusion_layer else fusion(config, image_width)
            for index in range(config.num_hidden_layers)
        ]
        self.bert = BertTrunk(config, layers)
        self.cls = BertOnlyMLMHead(config) if language_head else None
        self.apply(init_bert)
        if self.cls is not None:
            self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
            self.cls.predictions.decoder.bias = self.cls.predictions.bias

    @property
    def layers(self) -> nn.ModuleList:
        """Text layers, then fusion layers."""
        return self.bert.encoder["layer"]

    def resize_vocabulary(self, entries: int) -> None:
        """Keep the embeddings, and the head's outputs, of the first `entries` words."""
        self.bert.resize_vocabulary(entries)
        if self.cls is not None:  # its weight is tied to the embeddings
            resize_rows(self.cls.predictions.bias, entries)
            self.cls.predictions.decoder.out_features = entries

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run embeddings and text layers: [B, L] ids and mask (1 = token, 0 = padding) to states [B, L, D]."""
        return self.bert.encode(input_ids, attention_mask, self.fusion_layer)

    def fuse(
        self, states: Tensor, attention_mask: Tensor, image_tokens: Tensor, image_index: Tensor | None = None
    ) -> Tensor:
        """Run the fusion layers on states [R, L, D] with mask [R, L]; the rest as in `CrossAttention.forward`."""
        mask = attention_mask.bool()[:, None, None, :]
        for layer in self.layers[self.fusion_layer :]:
            states = self.bert.run(layer, states, mask, image_tokens, image_index)
        return states


def bert_sizes(text: TextSettings, layers: int | None = None) -> BertConfig:
    """Return the configuration of a BERT of these settings, of text and fusion layers unless a number is given."""
    return bert_config(
        text.vocab_size,
        text.width,
        text.depth + text.fusion_depth if layers is None else layers,
        text.heads,
        text.ffn_width,
        text.max_positions,
        text.dropout,
        text.pad_token_id,
    )


class Encoded(NamedTuple):
    """A batch of B pairs after the unimodal encoders of one model."""

    image_tokens: Tensor  # [B, N, V]
    text_states: Tensor  # [B, L, D]
    masked_states: Tensor | None  # [B, L, D] of the masked texts, if there are any
    image_features: Tensor  # [B, E], unit length
    text_features: Tensor  # [B, E], unit length


class ImageNetwork(nn.Module):
    """Base of the networks: the image encoder.

    Args:
        vision: sizes of the image encoder.
        activation_checkpointing: whether every block recomputes its activations in the backward pass.
    """

    def __init__(self, vision: VisionSettings, activation_checkpointing: bool) -> None:
        super().__init__()
        self.visual_encoder = _vit(vision)
        self.visual_encoder.set_grad_checkpointing(activation_checkpointing)

    def encode_image(self, image: Tensor) -> Tensor:
        """Encode images [B, 3, S, S] as tokens [B, N, V], CLS first."""
        set_vit_attention(self.visual_encoder, image)
        tokens: Tensor = self.visual_encoder(image)
        return tokens


def _vit(vision: VisionSettings) -> VisionTransformer:
    """Return an image encoder that keeps all tokens."""
    if vision.name is not None:
        return named_vit(vision.name, vision.image_size, "model.vision.name")
    encoder = VisionTransformer(
        img_size=vision.image_size,
        patch_size=vision.patch_size,
        embed_dim=vision.width,
        depth=vision.depth,
        num_heads=vision.heads,
        mlp_ratio=vision.mlp_ratio,
        num_classes=0,
        global_pool="",
        norm_layer=partial(nn.LayerNorm, eps=1e-6),  # that of DeiT and of the authors' ViT
        mlp_layer=LeanMlp,
    )
    encoder.blocks.apply(init_linear)
    return encoder


class ALBEFNetwork(ImageNetwork):
    """Image encoder, text and fusion encoder, and both projections, for the student or the teacher.

    Args:
        vision: sizes of the image encoder.
        text: sizes of the text and fusion encoder.
        embed_dim: embedding dimension E of the contrastive space.
        language_head: whether there is a head for masked language modeling.
        activation_checkpointing: whether every block recomputes its activations in the backward pass.
    """

    def __init__(
        self,
        vision: VisionSettings,
        text: TextSettings,
        embed_dim: int,
        language_head: bool = True,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(vision, activation_checkpointing)
        self.text_encoder = FusionBert(bert_sizes(text), text.depth, vision.width, language_head)
        self.text_encoder.bert.activation_checkpointing = activation_checkpointing
        self.vision_proj = nn.Linear(vision.width, embed_dim)
        self.text_proj = nn.Linear(text.width, embed_dim)

    def encode(self, batch: Batch, masked_ids: Tensor | None, slice_rows: int | None) -> Encoded:
        """Encode the images, the texts and the masked texts of a training batch (section 3.1).

        Args:
            batch: `image` [B, 3, S, S], `input_ids` and `attention_mask` [B, L].
            masked_ids: long [B, L], the texts with masked words; None without masked language modeling.
            slice_rows: pairs that are encoded at a time; None for all at once.
        """

        def encode_rows(image: Tensor, mask: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
            # Texts and masked texts go through the text layers as one batch.
            states = self.encode_text(torch.cat(texts), mask.repeat(len(texts), 1))
            return self.encode_image(image), *states.chunk(len(texts))

        texts = [batch["input_ids"]] if masked_ids is None else [batch["input_ids"], masked_ids]
        encoded = in_slices(encode_rows, slice_rows, batch["image"], batch["attention_mask"], *texts)
        image_tokens, text_states = encoded[:2]
        return Encoded(
            image_tokens,
            text_states,
            None if masked_ids is None else encoded[2],
            self.project_image(image_tokens),
            self.project_text(text_states),
        )

    def finish_image(self, states: Tensor, start: int) -> Tensor:
        """Run the image encoder from block `start` on: input of that block [B, N, V] to tokens [B, N, V]."""
        set_vit_attention(self.visual_encoder, states)
        for block in self.visual_encoder.blocks[start:]:
            states = block(states)
        return self.visual_encoder.norm(states)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode ids and mask [B, L] as states [B, L, D] before fusion."""
        return self.text_encoder.encode(input_ids, attention_mask)

    def fuse(
        self, states: Tensor, attention_mask: Tensor, image_tokens: Tensor, image_index: Tensor | None = None
    ) -> Tensor:
        """Fuse text states [R, L, D] with images; arguments as in `FusionBert.fuse`."""
        return self.text_encoder.fuse(states, attention_mask, image_tokens, image_index)

    def predict_words(self, states: Tensor) -> Tensor:
        """Map fused states [K, D] to vocabulary logits [K, W], in float32 at least.

        Raises:
            RuntimeError: If the network was built without a language-model head.
        """
        if self.text_encoder.cls is None:
            raise RuntimeError(
                "Expected a network with a language-model head, got one without: build it with language_head=True."
            )
        return at_least_float32(self.text_encoder.cls(states))

    def project_image(self, image_tokens: Tensor) -> Tensor:
        """Project image tokens [B, N, V] to unit-length contrastive features [B, E], in float32 at least."""
        return unit(self.vision_proj(image_tokens[:, 0]))

    def project_text(self, text_states: Tensor) -> Tensor:
        """Project text states [B, L, D] to unit-length contrastive features [B, E], in float32 at least."""
        return unit(self.text_proj(text_states[:, 0]))


def copy_student(student: nn.Module, teacher: nn.Module) -> None:
    """Make the teacher a copy of the student without gradients; `EMACallback` averages it during training."""
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
