"""Structural reparameterization: branches and norms of a trained network become single convolutions.

In eval mode BatchNorm is an affine map of each channel, which folds into the adjacent linear layer, and parallel linear
branches add up. timm sums the branches of its FastViT blocks; this file drives it in float64, compares every block with
the original, and folds the norms and layer scales that timm leaves.

Shapes: kernels [O, I, H, W], biases [O].
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from timm.layers import ConvNormAct
from timm.models.fastvit import (
    AttentionBlock,
    MobileOneBlock,
    ReparamLargeKernelConv,
    RepConditionalPosEnc,
    RepMixer,
    RepMixerBlock,
)
from torch import Tensor, nn

from ....common.errors import UserError
from ...core.memory import BatchNorm
from .text_mixer import ConvNorm, TextRepMixer, TextRepMixerBlock, folded

Folds = Literal["all", "branches"]
_BRANCHED = (RepMixer, MobileOneBlock, ReparamLargeKernelConv, RepConditionalPosEnc, TextRepMixer)


def reparameterize(model: nn.Module, folds: Folds = "all") -> nn.Module:
    """Return a copy of a trained network in its form for inference.

    A second call returns an equal copy.

    Args:
        model: in eval mode; timm's FastViT (MCi) towers and the MCt text tower are fused, the rest is copied.
        folds: "branches" fuses what the vendor's code does; "all" also folds the norms behind convolutions (of the
            feed-forward halves and of a ViT's stem), those before attention, and the scales of residual branches.

    Returns:
        The copy, in eval mode and without gradients.

    Raises:
        UserError: If a BatchNorm is in train mode, or a fused block differs from the original on random input.
    """
    training = [name for name, module in model.named_modules() if isinstance(module, BatchNorm) and module.training]
    if training:
        raise UserError(
            f"Expected a model in eval mode, got {len(training)} BatchNorm layers in train mode ({training[0]}, ...): "
            "call eval() first, fusing uses the running statistics."
        )
    fused = copy.deepcopy(model).eval().requires_grad_(False)
    _fuse_children(fused, {kind: _reparameterize_block for kind in _BRANCHED})
    if folds == "all":
        _fuse_children(fused, _NORMS)
    return fused.requires_grad_(False)


def norms_left(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers."""
    return [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]


def _fuse_children(module: nn.Module, fusers: dict[type, Callable[[Any], None]]) -> None:
    fuse = next((function for cls, function in fusers.items() if isinstance(module, cls)), None)
    if fuse is not None and getattr(module, "reparam_conv", None) is None:
        before = copy.deepcopy(module).double()
        dtype = next(module.parameters()).dtype
        fuse(module.double())
        _compare(before, module.to(dtype))
    for child in module.children():
        _fuse_children(child, fusers)


@torch.no_grad()
def _compare(before: nn.Module, after: nn.Module) -> None:
    """Compare two blocks on random input in float64; `after` may have been rounded."""
    first = next(layer.in_channels for layer in before.modules() if isinstance(layer, nn.Conv2d))
    channels = getattr(before, "in_chs", getattr(before, "dim", first))
    parameter = next(after.parameters())
    generator = torch.Generator().manual_seed(0)
    shape = (2, 16, channels) if isinstance(before, TextRepMixerBlock) else (2, channels, 16, 16)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(parameter.device)
    expected = before(inputs)
    outputs = copy.deepcopy(after).double()(inputs)
    # Weights are rounded to their precision once.
    limit = 64 * torch.finfo(parameter.dtype).eps * max(1.0, float(expected.abs().max()))
    error = float((outputs - expected).abs().max())
    if not error <= limit:
        raise UserError(
            f"Expected a reparameterized {type(before).__name__} that differs by at most {limit:.1e} from the original "
            f"on random input, got {error:.1e}: check whether its weights and statistics are finite, and not too large "
            f"for {parameter.dtype}."
        )


@torch.no_grad()
def _reparameterize_block(block: Any) -> None:
    block.reparameterize()
    vars(block).pop("id_tensor", None)  # timm's identity kernel, which only fusing needs


@torch.no_grad()
def _fold_norm_behind(block: ConvNormAct | ConvNorm) -> None:
    norm = block.bn
    if not isinstance(norm, BatchNorm):
        return
    kernel, bias = folded(block.conv.weight, block.conv.bias, norm)
    block.conv.weight.copy_(kernel)
    block.conv.bias = nn.Parameter(bias)
    block.bn = getattr(norm, "act", nn.Identity())


@torch.no_grad()
def _fold_block(block: RepMixerBlock | AttentionBlock | TextRepMixerBlock) -> None:
    """Fold layer scales into the layers before them, and the norm before attention into the attention's projection."""
    _fold_scale(block, "layer_scale_2" if isinstance(block, AttentionBlock) else "layer_scale", block.mlp.fc2)
    if isinstance(block, AttentionBlock):
        _fold_scale(block, "layer_scale_1", block.token_mixer.proj)
        norm, qkv = block.norm, block.token_mixer.qkv
        if isinstance(norm, BatchNorm):
            factor, shift = folded(torch.ones_like(norm.weight), None, norm)
            bias = qkv.weight @ shift
            qkv.bias = nn.Parameter(bias if qkv.bias is None else bias + qkv.bias)
            qkv.weight.copy_(qkv.weight * factor)
            block.norm = nn.Identity()


def _fold_scale(block: nn.Module, name: str, layer: nn.Module) -> None:
    scale: Any = getattr(block, name)
    if not hasattr(scale, "gamma"):
        return
    gamma = scale.gamma.flatten()
    for parameter in (layer.weight, layer.bias):
        assert isinstance(parameter, Tensor)
        parameter.copy_(parameter * gamma.reshape(-1, *(1 for _ in parameter.shape[1:])))
    setattr(block, name, nn.Identity())


_NORMS: dict[type, Callable[[Any], None]] = {
    ConvNormAct: _fold_norm_behind,
    ConvNorm: _fold_norm_behind,
    RepMixerBlock: _fold_block,
    AttentionBlock: _fold_block,
    TextRepMixerBlock: _fold_block,
}
