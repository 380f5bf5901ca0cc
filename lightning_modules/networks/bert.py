"""BERT's embeddings and layers under the names that its checkpoints give them.

Shapes: B texts, L tokens (CLS first), D width.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings

from ..core.memory import recomputed
from .attention import BERT_ATTENTION
from .initial import init_linear


class BertTrunk(nn.Module):
    """Embeddings and layers of a BERT, without pooler and heads.

    Args:
        config: sizes and dropout.
        layers: called with states [B, L, D] and a boolean mask [B, 1, 1, L].
    """

    embeddings: BertEmbeddings
    encoder: Any

    def __init__(self, config: BertConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.activation_checkpointing = False
        self.embeddings = BertEmbeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})

    def resize_vocabulary(self, entries: int) -> None:
        """Keep the embeddings of the first `entries` words."""
        words = self.embeddings.word_embeddings
        resize_rows(words.weight, entries)
        words.num_embeddings = entries

    def encode(self, input_ids: Tensor, attention_mask: Tensor, layers: int | None = None) -> Tensor:
        """Run the embeddings and the first layers.

        Args:
            input_ids: long [B, L].
            attention_mask: [B, L], 1 for a token, 0 for padding.
            layers: number of layers to run; None for all.

        Returns:
            States [B, L, D].
        """
        if input_ids.shape[0] == 0:  # `len` would fix the batch size of an exported program
            # The layers of transformers cannot reshape an empty batch. They run on a dummy row, because sharded
            # processes have to run the same layers.
            dummy = input_ids.new_zeros(1, input_ids.shape[1])
            return self.encode(dummy, torch.ones_like(dummy), layers)[:0]
        states: Tensor = self.embeddings(input_ids)
        mask = attention_mask.bool()[:, None, None, :]
        for layer in self.encoder["layer"][:layers]:
            states = self.run(layer, states, mask)
        return states

    def run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        """Run a layer, with its activations recomputed in the backward pass if `activation_checkpointing` is set."""
        states: Tensor = recomputed(layer, *inputs) if self.activation_checkpointing else layer(*inputs)
        return states


def resize_rows(parameter: nn.Parameter, rows: int) -> None:
    """Keep the first rows of a parameter; it stays the same object, so ties and references to it hold.

    Args:
        parameter: [R, ...].
        rows: number of rows afterwards; rows beyond R are zero, for weights that are loaded later.
    """
    kept = parameter.data[:rows]
    added = kept.new_zeros(rows - len(kept), *kept.shape[1:])
    parameter.data = torch.cat([kept, added])


def bert_config(
    vocab_size: int,
    width: int,
    layers: int,
    heads: int,
    ffn_width: int,
    max_positions: int,
    dropout: float,
    pad_token_id: int,
) -> BertConfig:
    """Return the `transformers` configuration of a BERT of these sizes.

    GELU, LayerNorm eps 1e-12 and two token types are those of bert-base-uncased.
    """
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=ffn_width,
        max_position_embeddings=max_positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=pad_token_id,
    )
    config._attn_implementation = BERT_ATTENTION
    return config


def init_bert(module: nn.Module) -> None:
    """Initialize embeddings from N(0, 0.02^2), as BERT, and matrices as `init_linear`."""
    init_linear(module)
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()
