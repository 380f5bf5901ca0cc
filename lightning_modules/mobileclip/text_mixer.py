"""MCt, the text tower of MobileCLIP-S0: convolutions over the words before and after four layers of attention.

Shapes: B texts, L tokens, D channels.
"""

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

KERNEL = 11  # words that a convolution sees (paper, table of kernel sizes 3, 11, 31)


class ConvNorm(nn.Module):
    """A depthwise convolution over the words, and BatchNorm.

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


class Branches(nn.Module):
    """Sum of BatchNorm alone and of convolutions with BatchNorm.

    Args:
        channels: D.
        convolutions: how many.
    """

    def __init__(self, channels: int, convolutions: int) -> None:
        super().__init__()
        self.identity = nn.BatchNorm2d(channels)
        self.conv_kxk = nn.ModuleList(ConvNorm(channels) for _ in range(convolutions))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        return torch.stack([self.identity(x), *(branch(x) for branch in self.conv_kxk)]).sum(0)


class LayerScale(nn.Module):
    """A factor for each channel.

    Args:
        channels: D.
        initial: all factors at the start.
    """

    def __init__(self, channels: int, initial: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels, 1, 1), initial))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        return x * self.gamma


class TextRepMixer(nn.Module):
    """Mixes words: x + scale (mixer(x) - norm(x)), which is one convolution once it is trained.

    Args:
        channels: D.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = Branches(channels, 0)
        self.mixer = Branches(channels, 1)
        self.layer_scale = LayerScale(channels)
        self.reparam_conv: nn.Conv2d | None = None  # takes the place of the rest once it is fused

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, 1, L] to the same."""
        if self.reparam_conv is not None:
            fused: Tensor = self.reparam_conv(x)
            return fused
        scaled: Tensor = self.layer_scale(self.mixer(x) - self.norm(x))
        return x + scaled


class TextConvMlp(nn.Module):
    """A depthwise convolution, then two pointwise layers with GELU between them.

    Args:
        channels: D.
        hidden: width between the layers.
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
    """Takes the place of a transformer layer.

    Parts have the names that timm's FastViT gives to the same parts of an image tower.

    Args:
        channels: D.
        hidden: width inside the second half.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.token_mixer = TextRepMixer(channels)
        self.mlp = TextConvMlp(channels, hidden)
        self.layer_scale = LayerScale(channels)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """[B, L, D] to the same; a convolution has no use for a mask."""
        x = self.token_mixer(x.transpose(1, 2).unsqueeze(2))
        x = x + self.layer_scale(self.mlp(x))
        return x.squeeze(2).transpose(1, 2)

    def get_weight_dtype(self) -> torch.dtype:
        """What open_clip casts the embedded words to."""
        return self.mlp.fc1.weight.dtype


def depthwise(channels: int, bias: bool) -> nn.Conv2d:
    """A convolution over the words, each channel by itself."""
    return nn.Conv2d(channels, channels, (1, KERNEL), padding=(0, KERNEL // 2), groups=channels, bias=bias)


def add_mixers(text: TextTransformer) -> None:
    """Put a mixer block, four times as wide inside, before and after a text tower's layers.

    Args:
        text: open_clip's text tower with as many layers as there is to be attention.
    """
    width = text.transformer.width
    first, last = (TextRepMixerBlock(width, 4 * width) for _ in range(2))
    text.transformer.resblocks = nn.ModuleList([first, *text.transformer.resblocks, last])
    text.transformer.layers = len(text.transformer.resblocks)
