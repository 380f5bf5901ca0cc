"""The folder of a CLIP model as the photo server Immich reads it: `visual/`, `textual/` and `config.json`.

Source: `machine-learning/immich_ml/models/clip/` of immich-app/immich (visual.py, textual.py, base.py). Both programs
are ONNX, take one row and return an embedding of unit length; texts are int32 token ids.

Shapes: L tokens of a text, E embedding dimension, D the embedding dimension for Immich.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.preprocessing import Preprocessing

FILES = {"image": "visual/model.onnx", "text": "textual/model.onnx"}
"""File of each tower."""
NAMES = {
    512: "ViT-B-32__openai",
    640: "RN50x4__openai",
    768: "ViT-L-14__openai",
    1024: "ViT-H-14__laion2b-s32b-b79k",
    1152: "ViT-SO400M-16-SigLIP2-256__webli",
    1536: "ViT-gopt-16-SigLIP2-256__webli",
}
"""A model of Immich's for each embedding dimension that it knows: its server takes the dimension from the name."""


def known_dimension(dimension: int) -> int:
    """Return the least embedding dimension of Immich's models that is not below E.

    Raises:
        UserError: If E is larger than all.
    """
    for known in NAMES:
        if known >= dimension:
            return known
    raise UserError(f"Expected at most {max(NAMES)} numbers of an embedding for Immich, got {dimension}.")


class Images(nn.Module):
    """An image tower whose features are filled with zeros up to D, which leaves cosines as they are."""

    def __init__(self, tower: nn.Module, dimension: int) -> None:
        super().__init__()
        self.tower = tower
        self.dimension = dimension

    def forward(self, image: Tensor) -> Tensor:
        """Encode images [B, 3, S, S] to [B, D]."""
        return _filled(self.tower(image), self.dimension)


class Texts(nn.Module):
    """A text tower that takes token ids alone, of 32 bits; its mask is where they are not the padding."""

    def __init__(self, tower: nn.Module, dimension: int, pad: int, masked: bool) -> None:
        super().__init__()
        self.tower = tower
        self.dimension = dimension
        self.pad = pad
        self.masked = masked

    def forward(self, text: Tensor) -> Tensor:
        """Encode token ids, int32 [B, L], to [B, D]."""
        ids = text.long()
        mask = ((ids != self.pad).long(),) if self.masked else ()
        return _filled(self.tower(ids, *mask), self.dimension)


def _filled(features: Tensor, dimension: int) -> Tensor:
    return F.pad(F.normalize(features.float(), dim=-1), (0, dimension - features.shape[-1]))


def padding_of(tokenizer: Tokenizer | None) -> int:
    """Return the id of the padding.

    Raises:
        UserError: If there is no tokenizer, which Immich reads.
    """
    if tokenizer is None:
        raise UserError("Expected a model with its tokenizer for Immich, got none: train with one in the data.")
    number: int = _padding(tokenizer)["pad_id"]
    return number


def write_configuration(folder: Path, config: Mapping[str, Any], dimension: int, tokenizer: Tokenizer) -> None:
    """Write `config.json`, `visual/preprocess_cfg.json` and the files of the tokenizer.

    Args:
        folder: an existing folder.
        config: has `context_length`, `vocab_size` and the record `preprocessing`.
        dimension: D.
        tokenizer: cuts and pads texts.

    Raises:
        UserError: If the preprocessing is unknown, or Immich cannot express it.
    """
    if not config["preprocessing"]:
        raise UserError(
            "Expected the preprocessing of the images for Immich, got none: export a checkpoint that was trained or "
            "validated with a datamodule of this package."
        )
    prepared = Preprocessing.from_dict(config["preprocessing"], "the checkpoint")
    size = prepared.image_size
    text = {"context_length": config["context_length"], "vocab_size": config["vocab_size"]}
    about = {"embed_dim": dimension, "vision_cfg": {"image_size": size}, "text_cfg": text}
    _write(folder / "config.json", about)
    _write(folder / "visual" / "preprocess_cfg.json", prepared.as_open_clip() | {"mode": "RGB", "size": [size, size]})
    _write(folder / "textual" / "tokenizer_config.json", {"pad_token": _padding(tokenizer)["pad_token"]})
    tokenizer.save(str(folder / "textual" / "tokenizer.json"))


def _padding(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return how a tokenizer pads, which one of `padding_tokenizer` does."""
    padding: dict[str, Any] = tokenizer.padding or {}
    return padding


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def ids_of_32_bits(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the token ids of a text tower's inputs as Immich gives them."""
    return {"text": inputs["input_ids"].to(torch.int32)}
