"""SHRe's encoders by name: any image network of timm and any text encoder of transformers, as tokens of one width.

Shapes: B pairs, S side of an image, N positions of an image, L text tokens, V width of a network, D width of a token.
"""

import dataclasses

import torch
from open_clip.timm_model import TimmModel
from torch import Tensor

from ..networks.clip.pair import (
    RANDOM,
    ImageTower,
    TextTower,
    completed_text,
    fit_projection,
    image_state,
    sourced,
    text_state,
)
from ..networks.clip.text_encoder import EncoderTower
from .settings import TextSettings, VisionSettings


class NamedImageEncoder(TimmModel):
    """An image network of timm as tokens: what the network pools, then its output at each position.

    Args:
        name: timm's name.
        width: D.
        image_size: S, in pixels.
    """

    def __init__(self, name: str, width: int, image_size: int) -> None:
        super().__init__(name, width, image_size, pool="", proj="linear")
        fit_projection(self)
        self.set_input_size(image_size)

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, S, S] to tokens [B, 1 + N, D]; N is 0 for a network that pools to another width."""
        outputs = self.trunk.forward_features(image)
        pooled = self.trunk.forward_head(outputs)[:, None]  # without a classifier
        if outputs.ndim == 4:  # [B, V, H, W], or [B, H, W, V] as of Swin
            outputs = outputs if outputs.shape[1] == self.trunk.num_features else outputs.movedim(-1, 1)
            outputs = outputs.flatten(2).transpose(1, 2)
        else:
            outputs = outputs[:, getattr(self.trunk, "num_prefix_tokens", 0) :]
        fits = outputs.shape[-1] == pooled.shape[-1]
        tokens: Tensor = self.head(torch.cat([pooled, outputs], 1) if fits else pooled)
        return tokens


class NamedTextEncoder(EncoderTower):
    """A text encoder of transformers as tokens: what is pooled of a text in place of the first token, then the others.

    Args:
        text: settings that name the encoder, completed by `named_text`.
        width: D.

    Raises:
        UserError: As `EncoderTower` does.
    """

    def __init__(self, text: TextSettings, width: int) -> None:
        assert text.config is not None
        assert text.pooling is not None
        super().__init__(text.config, text.pooling, "linear", width, text.max_tokens)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        """Map ids and mask [B, L] to tokens [B, L, D]."""
        states, pooled = self.states(input_ids, attention_mask)
        tokens: Tensor = self.proj(torch.cat([pooled[:, None], states[:, 1:]], 1))
        return tokens


def named_text(text: TextSettings) -> TextSettings:
    """Return settings that name an encoder, with its pooling and its configuration, independent of files.

    Raises:
        UserError: If there is no such encoder, or it is a causal decoder without a pooling.
    """
    tower = completed_text(_text_tower(text))
    return dataclasses.replace(text, pooling=tower.pooling, config=tower.config)


def load_named_image(encoder: NamedImageEncoder, vision: VisionSettings) -> str:
    """Load the weights of an image encoder by name, and return a description of their source.

    Raises:
        UserError: If weights are missing or of another network.
    """
    assert vision.name is not None
    tower = image_tower(vision)
    encoder.load_state_dict(image_state(encoder, tower, "model.vision.weights"))
    return f"image encoder {sourced(tower)}"


def load_named_text(encoder: NamedTextEncoder, text: TextSettings) -> str:
    """Load the weights of a text encoder by name, and return a description of their source.

    Raises:
        UserError: If weights are missing or of another network.
    """
    tower = _text_tower(text)
    encoder.load_state_dict(text_state(encoder, tower))
    return f"text encoder {sourced(tower)}"


def image_tower(vision: VisionSettings) -> ImageTower:
    """Return the description of an image encoder by name."""
    assert vision.name is not None
    return ImageTower(vision.name, vision.weights or RANDOM)


def _text_tower(text: TextSettings) -> TextTower:
    assert text.name is not None
    return TextTower(text.name, text.weights or RANDOM, text.tokenizer, text.pooling, text.prefix, config=text.config)
