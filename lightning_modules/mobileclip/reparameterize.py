"""Structural reparameterisation: branches and norms that a trained network no longer needs become one convolution.

In eval mode BatchNorm is an affine map of each channel, so it folds into the linear layer beside it, and parallel
linear branches add up. Everything is computed in float64 and compared with what it takes the place of.

Shapes: kernels [O, I, H, W], biases [O].
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
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
from torch.nn.modules.batchnorm import _BatchNorm

from .text_mixer import KERNEL, Branches, ConvNorm, TextRepMixer, TextRepMixerBlock

Folds = Literal["all", "branches"]
Kernel = tuple[Tensor, Tensor]


def reparameterize(model: nn.Module, folds: Folds = "all") -> nn.Module:
    """A copy of a trained network in the form for inference.

    What is done already is left alone, so a second call returns an equal copy.

    Args:
        model: in eval mode; timm's FastViT (MCi) towers and our text tower are fused, the rest is copied.
        folds: "branches" fuses what the vendor's code does; "all" also the norms behind convolutions (of the
            feed-forward halves and of a ViT's stem), those before attention, and the scales of residual branches.

    Returns:
        The copy, in eval mode and without gradients.

    Raises:
        ValueError: if a BatchNorm is in train mode: its statistics are not settled, or not meant.
        RuntimeError: if a fused part gives other outputs on random input.
    """
    training = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if training:
        raise ValueError(
            f"{len(training)} BatchNorm layers are in train mode ({training[0]}, ...), and fusing takes the statistics "
            "of eval mode: call eval() first."
        )
    fused = copy.deepcopy(model).eval().requires_grad_(False)
    _fuse_children(fused, _BRANCHES)
    if folds == "all":
        _fuse_children(fused, _NORMS)
    return fused.requires_grad_(False)


def norms_left(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers that are there."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def _fuse_children(module: nn.Module, fusers: dict[type, Callable[[Any], None]]) -> None:
    fuse = next((function for cls, function in fusers.items() if isinstance(module, cls)), None)
    if fuse is not None:
        before = copy.deepcopy(module)
        fuse(module)
        _compare(before, module)
    for child in module.children():
        _fuse_children(child, fusers)


@torch.no_grad()
def _compare(before: nn.Module, after: nn.Module) -> None:
    """Both on random input, in float64."""
    first = next(layer.in_channels for layer in before.modules() if isinstance(layer, nn.Conv2d))
    channels = getattr(before, "in_chs", getattr(before, "dim", first))
    parameter = next(after.parameters())
    generator = torch.Generator().manual_seed(0)
    shape = (2, 16, channels) if isinstance(before, TextRepMixerBlock) else (2, channels, 16, 16)
    image = torch.randn(shape, generator=generator, dtype=torch.float64).to(parameter.device)
    expected, found = (copy.deepcopy(network).double()(image) for network in (before, after))
    # Weights are rounded to their own precision once.
    limit = 64 * torch.finfo(parameter.dtype).eps * max(1.0, float(expected.abs().max()))
    error = float((found - expected).abs().max())
    if not error <= limit:
        raise RuntimeError(
            f"A fused {type(before).__name__} differs from what it was by {error:.1e} on random input, expected at "
            f"most {limit:.1e}: its weights or statistics are not finite, or too large for {parameter.dtype}."
        )


def fold(kernel: Tensor, bias: Tensor | None, norm: nn.Module) -> Kernel:
    """A convolution followed by BatchNorm, as one convolution, in float64."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    shift = norm.running_mean.double() if bias is None else norm.running_mean.double() - bias.double()
    shape = (-1, *(1 for _ in kernel.shape[1:]))
    return kernel.double() * factor.reshape(shape), norm.bias.double() - shift * factor


def dirac(channels: int, per_group: int, size: tuple[int, int], device: torch.device) -> Tensor:
    """The kernel that changes nothing [O, I, H, W]."""
    kernel = torch.zeros(channels, per_group, *size, dtype=torch.float64, device=device)
    rows = torch.arange(channels, device=device)
    kernel[rows, rows % per_group, size[0] // 2, size[1] // 2] = 1
    return kernel


def _padded(kernel: Tensor, size: tuple[int, int]) -> Tensor:
    """A smaller kernel in the middle of a larger one."""
    high, wide = ((to - now) // 2 for to, now in zip(size, kernel.shape[2:], strict=True))
    return F.pad(kernel, [wide, wide, high, high])


def _branch(branch: Any) -> Kernel:
    """A convolution with its norm."""
    return fold(branch.conv.weight, branch.conv.bias, branch.bn)


def _sum(branches: list[Kernel], size: tuple[int, int]) -> Kernel:
    kernels, biases = zip(*branches, strict=True)
    return torch.stack([_padded(kernel, size) for kernel in kernels]).sum(0), torch.stack(list(biases)).sum(0)


def _convolution(kernel: Tensor, bias: Tensor, like: Tensor, stride: Any = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size, or halves it, with these weights."""
    out, per_group, high, wide = kernel.shape
    conv = nn.Conv2d(
        per_group * groups, out, (high, wide), stride=stride, padding=(high // 2, wide // 2), groups=groups
    ).to(like)
    with torch.no_grad():
        conv.weight.copy_(kernel)
        conv.bias.copy_(bias)  # type: ignore[union-attr]
    return conv.eval()


def _mobileone_kernel(block: MobileOneBlock) -> Kernel:
    """Sum of the branches: BatchNorm alone, 1x1, and k x k."""
    size = (block.kernel_size, block.kernel_size)
    branches = [_branch(branch) for branch in block.conv_kxk or ()]
    if block.conv_scale is not None:
        branches.append(_branch(block.conv_scale))
    if block.identity is not None:
        kernel = dirac(block.in_chs, block.in_chs // block.groups, size, block.identity.weight.device)
        branches.append(fold(kernel, None, block.identity))
    return _sum(branches, size)


def _fuse_mobileone(block: MobileOneBlock) -> None:
    if block.reparam_conv is not None:
        return
    like = next(block.parameters())
    block.reparam_conv = _convolution(*_mobileone_kernel(block), like, block.stride, block.groups)
    del block.conv_kxk, block.conv_scale, block.identity
    block.inference_mode = True


def _fuse_large_kernel(block: ReparamLargeKernelConv) -> None:
    if block.reparam_conv is not None:
        return
    size = (block.kernel_size, block.kernel_size)
    branches = [_branch(block.large_conv)]
    if getattr(block, "small_conv", None) is not None:
        branches.append(_branch(block.small_conv))
    like = block.large_conv.conv.weight
    block.reparam_conv = _convolution(*_sum(branches, size), like, block.stride, block.groups)
    del block.large_conv
    if hasattr(block, "small_conv"):
        del block.small_conv


def _mixed(identity: Tensor, scale: Any, mixer: Kernel, norm: Kernel) -> Kernel:
    """The kernel of x + scale (mixer(x) - norm(x))."""
    gamma: Tensor = scale.gamma.double().flatten() if hasattr(scale, "gamma") else torch.ones_like(mixer[1])
    return identity + gamma[:, None, None, None] * (mixer[0] - norm[0]), gamma * (mixer[1] - norm[1])


def _fuse_mixer(block: RepMixer) -> None:
    if block.reparam_conv is not None:
        return
    like = next(block.parameters())
    identity = dirac(block.dim, 1, (block.kernel_size, block.kernel_size), like.device)
    kernels = _mobileone_kernel(block.mixer), _mobileone_kernel(block.norm)
    block.reparam_conv = _convolution(*_mixed(identity, block.layer_scale, *kernels), like, groups=block.dim)
    del block.mixer, block.norm, block.layer_scale
    block.inference_mode = True


def _fuse_text_mixer(block: TextRepMixer) -> None:
    if block.reparam_conv is not None:
        return
    like = block.layer_scale.gamma
    channels, size = len(like), (1, KERNEL)
    identity = dirac(channels, 1, size, like.device)

    def kernel(branches: Branches) -> Kernel:
        each = [fold(identity, None, branches.identity), *(_branch(branch) for branch in branches.conv_kxk)]
        return _sum(each, size)

    fused = _mixed(identity, block.layer_scale, kernel(block.mixer), kernel(block.norm))
    block.reparam_conv = _convolution(*fused, like, groups=channels)
    del block.mixer, block.norm, block.layer_scale


def _fuse_position(block: RepConditionalPosEnc) -> None:
    if block.reparam_conv is not None:
        return
    conv = block.pos_enc
    identity = dirac(block.dim, block.dim // block.groups, block.spatial_shape, conv.weight.device)
    block.reparam_conv = _convolution(identity + conv.weight, conv.bias, conv.weight, groups=block.groups)
    del block.pos_enc


def _fold_norm_behind(block: ConvNormAct | ConvNorm) -> None:
    norm = block.bn
    if not isinstance(norm, _BatchNorm):
        return
    conv = block.conv
    kernel, bias = fold(conv.weight, conv.bias, norm)
    with torch.no_grad():
        conv.weight.copy_(kernel)
        conv.bias = nn.Parameter(bias.to(conv.weight))
    block.bn = getattr(norm, "act", nn.Identity())


def _fold_block(block: RepMixerBlock | AttentionBlock | TextRepMixerBlock) -> None:
    """Scales of the residual branches into the layers before them, the norm before attention into its first layer."""
    _fold_scale(block, "layer_scale_2" if isinstance(block, AttentionBlock) else "layer_scale", block.mlp.fc2)
    if isinstance(block, AttentionBlock):
        _fold_scale(block, "layer_scale_1", block.token_mixer.proj)
        norm, qkv = block.norm, block.token_mixer.qkv
        if isinstance(norm, _BatchNorm):
            factor, shift = fold(torch.ones_like(norm.weight), None, norm)
            with torch.no_grad():
                bias = qkv.weight.double() @ shift
                qkv.bias = nn.Parameter((bias if qkv.bias is None else bias + qkv.bias).to(qkv.weight))
                qkv.weight.copy_(qkv.weight.double() * factor)
            block.norm = nn.Identity()


@torch.no_grad()
def _fold_scale(block: nn.Module, name: str, layer: nn.Module) -> None:
    scale: Any = getattr(block, name)
    if not hasattr(scale, "gamma"):
        return
    gamma = scale.gamma.double().flatten()
    for parameter in (layer.weight, layer.bias):
        assert isinstance(parameter, Tensor)
        parameter.copy_(parameter.double() * gamma.reshape(-1, *(1 for _ in parameter.shape[1:])))
    setattr(block, name, nn.Identity())


_BRANCHES: dict[type, Callable[[Any], None]] = {
    RepMixer: _fuse_mixer,
    MobileOneBlock: _fuse_mobileone,
    ReparamLargeKernelConv: _fuse_large_kernel,
    RepConditionalPosEnc: _fuse_position,
    TextRepMixer: _fuse_text_mixer,
}
_NORMS: dict[type, Callable[[Any], None]] = {
    ConvNormAct: _fold_norm_behind,
    ConvNorm: _fold_norm_behind,
    RepMixerBlock: _fold_block,
    AttentionBlock: _fold_block,
    TextRepMixerBlock: _fold_block,
}
