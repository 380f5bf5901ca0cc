"""Networks of the tasks: of those that classify a text with its image or images, and of VQA (section 5 of the paper).

Submodules have the authors' names, except for the doubled layers of `PairFusionLayer`.

Shapes: B samples or images, N image tokens (CLS first), L text tokens (CLS first), D text width, V image width, C
classes; in VQA Q questions of Lq tokens, A answers of L tokens, W words of the vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import BertConfig

from ...core.precision import at_least_float32, unit
from ..network import FusionBert, FusionLayer, ImageNetwork, bert_sizes
from ..settings import TextSettings, VisionSettings


class PairFusionLayer(nn.Module):
    """Two fusion layers, of which the first attends to the first image of a pair, and the second to the second.

    Only the key and value projections of cross-attention are shared.
    """

    def __init__(self, config: BertConfig, image_width: int) -> None:
        super().__init__()
        self.first = FusionLayer(config, image_width)
        self.second = FusionLayer(config, image_width)
        for name in ("key", "value"):
            self.second.crossattention.self[name] = self.first.crossattention.self[name]

    def forward(self, states: Tensor, mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Run both layers on states [B, L, D] with the boolean mask [B, 1, 1, L] and images [B, N, V]."""
        states = self.first(states, mask, first, None)
        out: Tensor = self.second(states, mask, second, None)
        return out


class TaskNetwork(ImageNetwork):
    """Image encoder, text and fusion encoder, and a head on the fused [CLS].

    Args:
        vision: sizes of the image encoder.
        text: sizes of the text and fusion encoder.
        head: maps the fused [CLS], [B, D], to logits [B, C].
        images: number of images of a sample, 1 or 2; with 2 each fusion layer is doubled.
        activation_checkpointing: whether every block recomputes its activations in the backward pass.
    """

    def __init__(
        self,
        vision: VisionSettings,
        text: TextSettings,
        head: nn.Module,
        images: int = 1,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(vision, activation_checkpointing)
        fusion = FusionLayer if images == 1 else PairFusionLayer
        self.text_encoder = FusionBert(bert_sizes(text), text.depth, vision.width, language_head=False, fusion=fusion)
        self.text_encoder.bert.activation_checkpointing = activation_checkpointing
        self.cls_head = head

    def fuse(self, input_ids: Tensor, attention_mask: Tensor, *image_tokens: Tensor) -> Tensor:
        """Fuse texts [B, L] with the tokens [B, N, V] of each image: logits [B, C] in float32 at least."""
        states = self.text_encoder.encode(input_ids, attention_mask)
        second = image_tokens[1] if len(image_tokens) > 1 else None
        fused = self.text_encoder.fuse(states, attention_mask, image_tokens[0], second)
        return at_least_float32(self.cls_head(fused[:, 0]))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *images: Tensor) -> Tensor:
        """Return logits [B, C] of texts [B, L] with their images, each [B, 3, S, S]; all go through the ViT at once."""
        if not len(input_ids):  # a process whose images are unusable; the layers cannot reshape an empty batch
            ids, *images_of_row = [each.new_zeros(1, *each.shape[1:]) for each in (input_ids, *images)]
            return self(ids, torch.ones_like(ids), *images_of_row)[:0]
        tokens = self.encode_image(torch.cat(images)).chunk(len(images))
        return self.fuse(input_ids, attention_mask, *tokens)


class AssignmentNetwork(TaskNetwork):
    """The networks of text assignment: those for pairs of images, and the frozen projections of the pre-training.

    Arguments are those of `ALBEFNetwork`.
    """

    def __init__(
        self, vision: VisionSettings, text: TextSettings, embed_dim: int, activation_checkpointing: bool = False
    ) -> None:
        super().__init__(vision, text, nn.Identity(), 2, activation_checkpointing)
        self.ta_head = nn.Linear(text.width, 3)
        # The text projection is not used, but the authors' checkpoints have it.
        self.vision_proj = nn.Linear(vision.width, embed_dim).requires_grad_(False)
        self.text_proj = nn.Linear(text.width, embed_dim).requires_grad_(False)

    def fuse(self, input_ids: Tensor, attention_mask: Tensor, *image_tokens: Tensor) -> Tensor:
        """Fuse texts [B, L] with the tokens [B, N, V] of two images: logits [B, 3] in float32 at least."""
        fused = super().fuse(input_ids, attention_mask, *image_tokens).to(image_tokens[0].dtype)
        return at_least_float32(self.ta_head(fused))

    def project_image(self, image_tokens: Tensor) -> Tensor:
        """Project image tokens [B, N, V] to unit-length contrastive features [B, E], in float32 at least."""
        return unit(self.vision_proj(image_tokens[:, 0]))


class VQANetwork(ImageNetwork):
    """Image encoder, question encoder and answer decoder, for the student or the teacher.

    The question encoder has the text and fusion layers of pre-training. The decoder has as many layers as there are
    fusion layers, each with cross-attention to the question, and its own embeddings and language-model head.

    Args:
        vision: sizes of the image encoder.
        text: sizes of the question encoder.
        activation_checkpointing: whether every block recomputes its activations in the backward pass.
    """

    def __init__(self, vision: VisionSettings, text: TextSettings, activation_checkpointing: bool = False) -> None:
        super().__init__(vision, activation_checkpointing)
        self.text_encoder = FusionBert(bert_sizes(text), text.depth, vision.width, language_head=False)
        self.text_decoder = FusionBert(bert_sizes(text, text.fusion_depth), 0, text.width)
        for bert in (self.text_encoder.bert, self.text_decoder.bert):
            bert.activation_checkpointing = activation_checkpointing

    def resize_vocabulary(self, entries: int) -> None:
        """Keep the embeddings, and the head's outputs, of the first `entries` words."""
        self.text_encoder.resize_vocabulary(entries)
        self.text_decoder.resize_vocabulary(entries)

    def encode_text(
        self, input_ids: Tensor, attention_mask: Tensor, image_tokens: Tensor, image_index: Tensor | None = None
    ) -> Tensor:
        """Encode questions, ids and mask [Q, Lq], with the tokens [B, N, V] of their images: [Q, Lq, D].

        `image_index`, long [Q], is the image of each question; None if question b belongs to image b.
        """
        states = self.text_encoder.encode(input_ids, attention_mask)
        return self.text_encoder.fuse(states, attention_mask, image_tokens, image_index)

    def decode(
        self,
        input_ids: Tensor,
        visible: Tensor,
        question_states: Tensor,
        question_mask: Tensor,
        question_index: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the decoder on answers.

        Args:
            input_ids: long [A, L].
            visible: boolean [A, 1, L, L], the tokens that each token attends to.
            question_states: [Q, Lq, D].
            question_mask: [Q, Lq].
            question_index: long [A], the question of each answer; None if answer q belongs to question q.
            position_ids: long [A, L]; None counts from 0.

        Returns:
            States [A, L, D].
        """
        if not len(input_ids):  # a dummy row, as in `BertTrunk.encode`, because sharded networks communicate
            ids = torch.zeros(1, 1, dtype=torch.long, device=input_ids.device)
            mask = torch.ones_like(ids)
            question = question_states.new_zeros(1, 1, question_states.shape[-1])
            states = self.decode(ids, mask.bool()[None, None], question, mask)
            return states.expand(1, input_ids.shape[1], -1)[:0]
        bert = self.text_decoder.bert
        question_visible = question_mask != 0
        states = bert.embeddings(input_ids, position_ids=position_ids)
        for layer in self.text_decoder.layers:
            states = bert.run(layer, states, visible, question_states, question_index, question_visible)
        return states

    def predict_words(self, states: Tensor) -> Tensor:
        """Map states [P, D] to vocabulary logits [P, W], in float32 at least."""
        assert self.text_decoder.cls is not None
        return at_least_float32(self.text_decoder.cls(states))
