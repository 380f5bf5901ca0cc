"""The two towers of an image-text model: as separate modules, and the layer of each parameter.

Shapes: B images or texts, S side of an image in pixels, L tokens of a text, E embedding dimension.
"""

import copy
import re
from typing import Any, NamedTuple

import torch
from open_clip import CLIP, CustomTextCLIP
from open_clip.transformer import LayerNormFp32
from timm.models import group_parameters
from torch import Tensor, nn

from ....common.errors import UserError
from ...core.precision import unit
from .reparameterize import reparameterize
from .text_encoder import EncoderTower

_BLOCK = re.compile(r"^transformer\.resblocks\.(\d+)\.|^layer(\d)\.")
_ENCODER_BLOCK = re.compile(r"^transformer\.(?:[a-z]+\.)?(?:layers?|blocks?|h)\.(\d+)\.")
_ENCODER_EMBEDDING = re.compile(r"^transformer\.(\w*embed\w*|shared|wte|wpe)\.")
_EMBEDDING = re.compile(
    r"^(conv\d|bn\d|class_embedding|positional_embedding|patch_embed|ln_pre|token_embedding|cls_emb)(\.|$)"
)


class ImageTower(nn.Module):
    """Encode images.

    Args:
        visual: the image tower of an open_clip model.
        normalize: whether features are scaled to unit length.
    """

    def __init__(self, visual: nn.Module, normalize: bool) -> None:
        super().__init__()
        self.visual = visual
        self.normalize = normalize

    def forward(self, image: Tensor) -> Tensor:
        """Encode normalized images [B, 3, S, S] of any precision to [B, E] in the precision of the weights."""
        features: Tensor = self.visual(image.to(next(self.parameters()).dtype))
        return unit(features).to(features.dtype) if self.normalize else features


class TextTower(nn.Module):
    """Encode texts.

    Args:
        model: an open_clip model; its image tower is not used.
        normalize: whether features are scaled to unit length.
    """

    def __init__(self, model: nn.Module, normalize: bool) -> None:
        super().__init__()
        self.model = model
        self.normalize = normalize

    def forward(self, input_ids: Tensor) -> Tensor:
        """Encode token ids [B, L] to [B, E] in the precision of the weights."""
        features: Tensor = self.model.encode_text(input_ids)  # type: ignore[operator]
        return unit(features).to(features.dtype) if self.normalize else features


def towers(
    model: CLIP | CustomTextCLIP, fused: bool = True, normalize: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[ImageTower, TextTower]:
    """Return copies of a trained model's towers, in eval mode and without gradients.

    Args:
        model: a model in eval mode.
        fused: whether to reparameterize the copies.
        normalize: whether features are scaled to unit length.
        dtype: precision of weights and features; reparameterization comes before rounding.

    Raises:
        UserError: If the model is of another kind, or is to be reparameterized in train mode.
    """
    if type(model) not in (CLIP, CustomTextCLIP):
        raise UserError(
            f"Expected open_clip's CLIP or CustomTextCLIP, which are an image and a text tower, got a "
            f"{type(model).__name__}: export it with open_clip."
        )
    both: Any = reparameterize(model) if fused else copy.deepcopy(model).eval().requires_grad_(False)
    for module in both.modules():
        if type(module) is LayerNormFp32:
            # It casts its input but not its weights; torch's LayerNorm computes half precision in float32.
            module.__class__ = nn.LayerNorm
    both.to(dtype)
    image = ImageTower(both.visual, normalize)
    del both.visual, both.logit_scale
    both.logit_bias = None
    return image.eval(), TextTower(both, normalize).eval()


class Layers(NamedTuple):
    """Layers of a tower, for locks and for layer-wise learning rates.

    Attributes:
        blocks: number n of blocks.
        of: layer of each parameter by name: 0 for embeddings, 1 to n for blocks, n + 1 for what follows.
    """

    blocks: int
    of: dict[str, int]


def layers_of(tower: nn.Module) -> Layers:
    """Return the layers of an image or text tower of open_clip.

    Blocks are those of a transformer, of open_clip's or of the library transformers, the four stages of a ResNet, or
    the groups of timm's `group_matcher`.

    Args:
        tower: `visual` or `text` of a model.
    """
    trunk = getattr(tower, "trunk", None)
    if isinstance(trunk, nn.Module):
        groups = group_parameters(trunk, trunk.group_matcher(coarse=False))  # type: ignore[operator]
        # timm counts the last norm to the last block, and a classifier, here the projection, as a group.
        projects = any(True for _ in trunk.get_classifier().parameters())  # type: ignore[operator]
        last = max(groups) + (not projects)
        numbers = {f"trunk.{name}": group for group, names in groups.items() for name in names}
        return Layers(last - 1, {name: numbers.get(name, last) for name, _ in tower.named_parameters()})
    if isinstance(tower, EncoderTower):
        return _layers_of_encoder(tower)
    matches = {name: _BLOCK.match(name) for name, _ in tower.named_parameters()}
    blocks = {name: int(match[1] or int(match[2] or 0) - 1) + 1 for name, match in matches.items() if match}
    last = max(blocks.values(), default=0) + 1
    return Layers(
        last - 1,
        {name: blocks.get(name, 0 if _EMBEDDING.match(name) else last) for name, _ in tower.named_parameters()},
    )


def _layers_of_encoder(tower: EncoderTower) -> Layers:
    blocks = {}
    embeddings = set()
    for name, _ in tower.named_parameters():
        if match := _ENCODER_BLOCK.match(name):
            blocks[name] = int(match[1]) + 1
        elif _ENCODER_EMBEDDING.match(name):
            embeddings.add(name)
    count = max(blocks.values(), default=0)
    names = (name for name, _ in tower.named_parameters())
    return Layers(count, {name: 0 if name in embeddings else blocks.get(name, count + 1) for name in names})
