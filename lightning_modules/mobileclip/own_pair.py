"""A teacher of the user's own that embeds images and texts.

Shapes: T texts, L tokens, embedding dimension E.
"""

import math
from typing import Any

import torch
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.preprocessing import Preprocessing
from ..core.frozen import Frozen
from ..networks.own_teacher import checked_output, class_path, stated_normalization, stated_size
from ..networks.published_clip import PublishedCLIP, Tokenizer

_REMEDY = "correct the class, or its attributes image_size and tokenizer."


class OwnPair(nn.Module):
    """The towers of a network of the user's own, with a scale as published models have it.

    Args:
        network: has the methods `encode_image` and `encode_text`.
        scale: factor of its cosines.
    """

    def __init__(self, network: Any, scale: float) -> None:
        super().__init__()
        self.network = network
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))

    def encode_image(self, images: Tensor) -> Tensor:
        """Map normalized images [B, 3, S, S] to embeddings [B, E]."""
        embeddings: Tensor = self.network.encode_image(images)
        return embeddings

    def encode_text(self, input_ids: Tensor) -> Tensor:
        """Map token ids [T, L] to embeddings [T, E]."""
        embeddings: Tensor = self.network.encode_text(input_ids)
        return embeddings


def own_pair(network: nn.Module, scale: float | None) -> PublishedCLIP:
    """Return a network of the user's own in the form of a published model.

    Args:
        network: has the methods `encode_image` (images [B, 3, S, S] to [B, E]) and `encode_text` (token ids [T, L] to
            [T, E]), and the attributes `mean`, `std`, `image_size` and, if its tokens are not CLIP's, `tokenizer`.
        scale: factor of its cosines; None takes its parameter `logit_scale`, the logarithm of the factor.

    Raises:
        UserError: If one of these is missing or does not fit.
    """
    name = class_path(network)
    needed = ("encode_image", "encode_text", "image_size")
    missing = [member for member in needed if getattr(network, member, None) is None]
    if scale is None and not hasattr(network, "logit_scale"):
        missing.append("logit_scale (or a scale beside the network)")
    if missing:
        raise UserError(
            f"Expected encode_image, encode_text and image_size of the teacher {name}, got none of the name "
            f"{', '.join(missing)}: add it to the class."
        )
    own: Any = network
    normalisation, side = stated_normalization(network), stated_size(network) or 0
    tokenizer: Tokenizer = getattr(own, "tokenizer", None) or SimpleTokenizer()
    pair = OwnPair(network, float(own.logit_scale.exp()) if scale is None else scale).float().eval()
    image = checked_output(network, pair.encode_image, torch.zeros(1, 3, side, side), None, _REMEDY)
    checked_output(network, pair.encode_text, tokenizer(["a photo"]), image.shape[1], _REMEDY)
    preprocessing = Preprocessing(side, *normalisation, "bicubic")
    return PublishedCLIP(pair, preprocessing, tokenizer, name, "model.teachers.network", Frozen(pair).fingerprint())
