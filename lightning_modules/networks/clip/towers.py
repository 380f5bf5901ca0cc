"""The two towers of an image-text model as separate modules.

Shapes: B images or texts, S side of an image in pixels, L tokens of a text, E embedding dimension.
"""

import copy
from typing import Any

import torch
from open_clip import CLIP, CustomTextCLIP
from open_clip.transformer import LayerNormFp32
from torch import Tensor, nn

from ....common.errors import UserError
from ...core.precision import unit
from .reparameterize import reparameterize


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
