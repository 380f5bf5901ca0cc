"""ALBEF's networks for visual question answering: a question encoder and an answer decoder (section 5 of the paper).

Submodules have the authors' names. Shapes as in `answers.py`; B images, N image tokens, V image width.
"""

import torch
from torch import Tensor, nn

from ...core.precision import at_least_float32
from ...networks.attention import set_vit_attention
from ..network import FusionBert, bert_sizes, image_encoder
from ..settings import TextSettings, VisionSettings


class VQANetwork(nn.Module):
    """Image encoder, question encoder and answer decoder, for the student or the teacher.

    The question encoder has the text and fusion layers of pre-training. The decoder has as many layers as there are
    fusion layers, each with cross-attention to the question, and its own embeddings and language-model head.

    Args:
        vision: sizes of the image encoder.
        text: sizes of the question encoder.
        activation_checkpointing: whether every block recomputes its activations in the backward pass.
    """

    def __init__(self, vision: VisionSettings, text: TextSettings, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.visual_encoder = image_encoder(vision, activation_checkpointing)
        self.text_encoder = FusionBert(bert_sizes(text), text.depth, vision.width, language_head=False)
        self.text_decoder = FusionBert(bert_sizes(text, text.fusion_depth), 0, text.width)
        for bert in (self.text_encoder.bert, self.text_decoder.bert):
            bert.activation_checkpointing = activation_checkpointing

    def resize_vocabulary(self, entries: int) -> None:
        """Keep the embeddings, and the head's outputs, of the first `entries` words."""
        self.text_encoder.resize_vocabulary(entries)
        self.text_decoder.resize_vocabulary(entries)

    def encode_image(self, image: Tensor) -> Tensor:
        """Encode images [B, 3, S, S] as tokens [B, N, V], CLS first."""
        set_vit_attention(self.visual_encoder, image)
        tokens: Tensor = self.visual_encoder(image)
        return tokens

    def encode_text(
        self, input_ids: Tensor, attention_mask: Tensor, image_tokens: Tensor, image_index: Tensor | None = None
    ) -> Tensor:
        """Encode questions, ids and mask [Q, Lq], with their images: [Q, Lq, D].

        Args:
            input_ids: long [Q, Lq].
            attention_mask: [Q, Lq].
            image_tokens: [B, N, V].
            image_index: long [Q], the image of each question; None if question b belongs to image b.
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
        bert, shown = self.text_decoder.bert, question_mask != 0
        if not len(input_ids):  # as in `BertTrunk.encode`
            one = torch.zeros(1, 1, dtype=torch.long, device=input_ids.device)
            seen, states = (
                torch.ones(1, 1, 1, 1, dtype=torch.bool, device=one.device),
                question_states.new_zeros(1, 1, 1),
            )
            states = states.expand(1, 1, question_states.shape[-1])
            run = self.decode(one, seen, states, torch.ones_like(one))
            return run.expand(1, input_ids.shape[1], -1)[:0]
        states = bert.embeddings(input_ids, position_ids=position_ids)
        for layer in self.text_decoder.layers:
            states = bert.run(layer, states, visible, question_states, question_index, shown)
        return states

    def predict_words(self, states: Tensor) -> Tensor:
        """Map states [P, D] to vocabulary logits [P, W], in float32 at least."""
        assert self.text_decoder.cls is not None
        return at_least_float32(self.text_decoder.cls(states))
