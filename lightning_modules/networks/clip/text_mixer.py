"""MCt, the text tower of MobileCLIP-S0: convolutions over the tokens before and after four layers of attention.

Shapes: B texts, L tokens, D channels.
"""

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from ...core.memory import BatchNorm

KERNEL = 11  # tokens (paper, table of kernel sizes 3, 11, 31)


class ConvNorm(nn.Module):
    """A depthwise convolution over the tokens, and BatchNorm.

    Args:
        channels: D.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = depthwise(channels, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        normed: Tensor = self.bn(self.conv(x))
        return normed

    def kernel(self) -> tuple[Tensor, Tensor]:
        """Return kernel and bias of the one convolution that equals both layers in eval mode."""
        return folded(self.conv.weight, self.conv.bias, self.bn)


class Branches(nn.Module):
    """Sum of a BatchNorm and of convolutions with BatchNorm.

    Args:
        channels: D.
        convolutions: number of convolutions.
    """

    def __init__(self, channels: int, convolutions: int) -> None:
        super().__init__()
        self.identity = nn.BatchNorm2d(channels)
        self.conv_kxk = nn.ModuleList(ConvNorm(channels) for _ in range(convolutions))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        return torch.stack([self.identity(x), *(branch(x) for branch in self.conv_kxk)]).sum(0)

    def kernel(self, identity: Tensor) -> tuple[Tensor, Tensor]:
        """Return kernel and bias of the one convolution that equals the sum in eval mode.

        Args:
            identity: kernel [D, 1, 1, KERNEL] of the identity.
        """
        each = [folded(identity, None, self.identity), *(branch.kernel() for branch in self.conv_kxk)]  # type: ignore[operator]
        kernels, biases = zip(*each, strict=True)
        return torch.stack(kernels).sum(0), torch.stack(biases).sum(0)


class LayerScale(nn.Module):
    """A learned factor for each channel.

    Args:
        channels: D.
        initial: initial value of the factors.
    """

    def __init__(self, channels: int, initial: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels, 1, 1), initial))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        return x * self.gamma


class TextRepMixer(nn.Module):
    """Mix tokens: x + scale (mixer(x) - norm(x)), which `reparameterize` turns into one convolution.

    Args:
        channels: D.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = Branches(channels, 0)
        self.mixer = Branches(channels, 1)
        self.layer_scale = LayerScale(channels)
        self.reparam_conv: nn.Conv2d | None = None  # replaces the rest after `reparameterize`

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        if self.reparam_conv is not None:
            fused: Tensor = self.reparam_conv(x)
            return fused
        scaled: Tensor = self.layer_scale(self.mixer(x) - self.norm(x))
        return x + scaled

    def reparameterize(self) -> None:
        """Replace the branches by one convolution, as the blocks of timm's FastViT do (`reparameterize_model`)."""
        if self.reparam_conv is not None:
            return
        gamma = self.layer_scale.gamma.detach()
        identity = gamma.new_zeros(len(gamma), 1, 1, KERNEL)
        identity[..., KERNEL // 2] = 1
        kernel, bias = (
            mixer - norm for mixer, norm in zip(self.mixer.kernel(identity), self.norm.kernel(identity), strict=True)
        )
        conv = depthwise(len(gamma), bias=True).to(gamma)
        conv.weight = nn.Parameter(identity + gamma[..., None] * kernel)
        conv.bias = nn.Parameter(gamma.flatten() * bias)
        self.reparam_conv = conv.eval()
        del self.mixer, self.norm, self.layer_scale


class TextConvMlp(nn.Module):
    """A depthwise convolution, then two pointwise layers with GELU between them.

    Args:
        channels: D.
        hidden: hidden width.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.conv = ConvNorm(channels)
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.act = nn.GELU()
        self.fc2 = nn.Conv2d(hidden, channels, 1)
        for layer in (self.conv.conv, self.fc1, self.fc2):
            nn.init.trunc_normal_(layer.weight, std=0.02)  # as FastViT
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        out: Tensor = self.fc2(self.act(self.fc1(self.conv(x))))
        return out


class TextRepMixerBlock(nn.Module):
    """A block in place of a transformer layer.

    Its parts are named as in timm's FastViT.

    Args:
        channels: D.
        hidden: hidden width of the MLP.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.token_mixer = TextRepMixer(channels)
        self.mlp = TextConvMlp(channels, hidden)
        self.layer_scale = LayerScale(channels)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """[B, L, D] to the same; the attention mask is ignored."""
        x = self.token_mixer(x.transpose(1, 2).unsqueeze(2))
        x = x + self.layer_scale(self.mlp(x))
        return x.squeeze(2).transpose(1, 2)

    def get_weight_dtype(self) -> torch.dtype:
        """Return the precision that open_clip casts token embeddings to."""
        return self.mlp.fc1.weight.dtype


def depthwise(channels: int, bias: bool) -> nn.Conv2d:
    """Return a depthwise convolution over the tokens."""
    return nn.Conv2d(channels, channels, (1, KERNEL), padding=(0, KERNEL // 2), groups=channels, bias=bias)


def add_mixers(text: TextTransformer) -> None:
    """Add a mixer block with an MLP ratio of 4 before and after a text tower's layers, in place.

    Args:
        text: open_clip's text tower with the layers of attention.
    """
    width = text.transformer.width
    first, last = (TextRepMixerBlock(width, 4 * width) for _ in range(2))
    text.transformer.resblocks = nn.ModuleList([first, *text.transformer.resblocks, last])
    text.transformer.layers = len(text.transformer.resblocks)


@torch.no_grad()
def folded(kernel: Tensor, bias: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return kernel and bias of a linear layer or convolution that includes the BatchNorm behind it, in eval mode.

    Args:
        kernel: [O, ...].
        bias: [O].
        norm: a BatchNorm of O channels.
    """
    assert isinstance(norm, BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    shift = norm.running_mean if bias is None else norm.running_mean - bias
    return kernel * factor.reshape(-1, *(1 for _ in kernel.shape[1:])), norm.bias - shift * factor
