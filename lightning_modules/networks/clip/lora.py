"""LoRA in the towers (Hu et al., arXiv 2106.09685), by the library `peft`.

A weight W becomes W + (alpha / r) B A with a trained A [r, in] and B [out, r], which starts at zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ....common.errors import UserError
from ....common.ranges import BELOW_ONE, COUNT, POSITIVE, SettingsGroup
from ..attention import attend

TARGETS = (
    *("attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj"),  # open_clip
    *("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"),  # timm
    *("self.query", "self.key", "self.value", "attention.output.dense", "intermediate.dense", "output.dense"),  # BERT's
    *("attn.q", "attn.k", "attn.v", "attn.o"),  # MPNet
    *("q_lin", "k_lin", "v_lin", "out_lin", "ffn.lin1", "ffn.lin2"),  # DistilBERT
    *("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"),  # T5
    *("DenseReluDense.wi", "DenseReluDense.wi_0", "DenseReluDense.wi_1", "DenseReluDense.wo"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "self_attn.o_proj"),  # NLLB
    *("fc1", "fc2", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""Ends of the names of layers that LoRA adapts by default: attention and MLP of both towers."""


@dataclasses.dataclass(frozen=True)
class LoRASettings(SettingsGroup, option="tuning.lora"):
    """Low-rank adapters.

    Args:
        rank: rank r of an adapter.
        alpha: alpha / rank is the factor of an adapter.
        dropout: dropout of an adapter's input.
        targets: ends of the names of the adapted layers, such as `attn.out_proj`; None means attention and MLP.
        weights: folder of adapters (`vlightning export --layout adapters`) to start from.

    Raises:
        UserError: If the rank is below 1, or the dropout is not in [0, 1).
    """

    rank: Annotated[int, COUNT] = 16
    alpha: Annotated[float, POSITIVE] = 32.0
    dropout: Annotated[float, BELOW_ONE] = 0.0
    targets: list[str] | None = None
    weights: str | None = None


class LinearAttention(nn.Module):
    """Self-attention of open_clip whose projections are linear layers, which adapters can wrap.

    Args:
        attention: torch's module, whose weights are taken over.
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        width = attention.embed_dim
        self.num_heads = attention.num_heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.in_proj.weight = attention.in_proj_weight
        self.in_proj.bias = attention.in_proj_bias
        self.out_proj = nn.Linear(width, width)
        self.out_proj.weight = attention.out_proj.weight
        self.out_proj.bias = attention.out_proj.bias

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Attend as `SelfAttention` does; the arguments are those of torch's module."""
        visible = None if attn_mask is None else attn_mask == 0
        if visible is not None and visible.dim() == 3:
            visible = visible.unflatten(0, (-1, self.num_heads))
        projected = self.in_proj(query).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = attend(projected[0], projected[1], projected[2], visible)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


def add_adapters(model: nn.Module, settings: LoRASettings) -> None:
    """Add adapters to a model in place; only they train afterwards.

    Args:
        model: a pair of towers.
        settings: rank, factor and layers.

    Raises:
        UserError: If `peft` is missing, or a target does not exist.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            "Expected the package peft for tuning.lora, which is not installed: run pip install 'vlightning[lora]', or "
            "leave tuning.lora out."
        ) from error
    _linear_attention(model)
    targets = _existing(model, settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a factor, any number
        lora_dropout=settings.dropout,
        target_modules=targets,
    )
    inject_adapter_in_model(config, model)


def base_state(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names in a state dict with adapters of the weights below them, by the names without adapters."""
    return {plain_name(name): name for name in state if ".lora_" not in name}


def plain_name(name: str) -> str:
    """Return the name that a weight has in a model without adapters."""
    return name.replace(".base_layer.", ".").replace("attn.in_proj.", "attn.in_proj_")


def merged_state(state: Mapping[str, Tensor], settings: LoRASettings) -> dict[str, Tensor]:
    """Return the state dict of the plain model that computes the same as one with adapters.

    Args:
        state: state dict of a model with adapters.
        settings: those of the adapters.
    """
    merged = {}
    for plain, name in base_state(state).items():
        weight = state[name]
        adapter = name.removesuffix("base_layer.weight")
        down, up = (state.get(f"{adapter}lora_{letter}.default.weight") for letter in "AB")
        if name.endswith("base_layer.weight") and down is not None and up is not None:
            # Of a convolution of size 1, which MLPs of timm are, the weights have two dimensions of size 1 more.
            change = (up.flatten(1).double() @ down.flatten(1).double()) * settings.alpha / settings.rank
            weight = (weight.double() + change.reshape(weight.shape)).to(weight.dtype)
        merged[plain] = weight
    return merged


def adapter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters of a state dict, under peft's names of a file."""
    return {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.contiguous()
        for name, tensor in state.items()
        if ".lora_" in name
    }


def load_adapters(model: nn.Module, folder: str | Path) -> None:
    """Load adapters from a folder into a model that has adapters.

    Raises:
        UserError: If there is no such folder, or its adapters are of another model, rank or of other layers.
    """
    from safetensors.torch import load_file

    file = Path(folder).expanduser() / ADAPTER_FILE
    if not file.is_file():
        raise UserError(
            f"Expected a folder with {ADAPTER_FILE} as tuning.lora.weights, got {str(folder)!r}: correct it."
        )
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    loaded = load_file(file)
    names = {next(iter(adapter_state({name: tensor}))): name for name, tensor in state.items()}
    if loaded.keys() != names.keys() or any(loaded[name].shape != state[names[name]].shape for name in loaded):
        raise UserError(
            f"Expected the adapters of this model with the rank and the targets of tuning.lora in {str(folder)!r}, got "
            "others: give the model, rank and targets that they were trained with."
        )
    with torch.no_grad():
        for name, tensor in loaded.items():
            state[names[name]].copy_(tensor)


ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""File names of peft."""


def _linear_attention(model: nn.Module) -> None:
    for block in model.modules():
        attention: Any = getattr(block, "attn", None)
        plain = isinstance(attention, nn.MultiheadAttention) and attention.in_proj_weight is not None
        if plain and attention.batch_first and not hasattr(block, "ln_1_kv"):
            block.attn = LinearAttention(attention)


def _existing(model: nn.Module, targets: list[str] | None) -> list[str]:
    """Return the targets that a model has; given ones must all exist."""
    classes = (nn.Linear, nn.Conv2d)
    names = [name for name, module in model.named_modules() if isinstance(module, classes)]
    matches = [end for end in targets or TARGETS if any(f".{name}".endswith(f".{end}") for name in names)]
    missing = [] if targets is None else sorted(set(targets) - set(matches))
    if missing or not matches:
        ends = sorted({".".join(name.split(".")[-2:]) for name in names if "." in name})
        raise UserError(
            f"Expected tuning.lora.targets that end the name of a layer of this model, got "
            f"{', '.join(missing) or 'a model without attention'}: choose from {', '.join(ends)}."
        )
    return matches
