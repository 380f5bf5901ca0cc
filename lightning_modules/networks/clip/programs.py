"""Export of the two towers of an image-text model as programs that run without this project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip import CLIP, CustomTextCLIP
from torch import Tensor, nn

from ....common.clip_vocabulary import CLIP_VOCABULARY, clip_tokenizer_json
from ....common.errors import UserError
from ...core.precision import unit
from ...core.programs import (
    Tower,
    example_images,
    example_texts,
    padding_tokenizer,
    write_programs,
)
from .text_encoder import EncoderTower
from .towers import towers


def export_towers(
    model: CLIP | CustomTextCLIP,
    folder: str | Path,
    format: str,
    image_size: int,
    fused: bool = True,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
    preprocessing: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> list[Path]:
    """Write both towers as programs for batches of any size, `config.json`, and their tokenizer, atomically.

    Inputs are float32 images and int64 token ids; features have the precision of the weights. The tokenizer, for the
    `tokenizers` library, pads and cuts texts to the context length; a model with another vocabulary has none.

    Args:
        model: as in `towers`.
        folder: a new or an empty folder.
        format: as in `write_programs`.
        image_size: S.
        fused: as in `towers`.
        normalize: as in `towers`.
        dtype: as in `write_programs`; reparameterization comes before rounding. On x86, onnxruntime may crash on
            float16 unless its optimization stops at ORT_ENABLE_EXTENDED.
        preprocessing: record of the image preprocessing for the configuration, plain data.
        tokenizer: the tokenizer of a text encoder of transformers, as JSON text; other models have CLIP's.

    Returns:
        The files.

    Raises:
        UserError: As in `write_programs`, or if the model takes no images of this size.
        OSError: If the files cannot be written.
    """
    image, text = (tower.cpu() for tower in towers(model, fused, normalize))
    _check_size(image, image_size)
    length = model.context_length
    words = model.vocab_size
    encoder = model.text if isinstance(getattr(model, "text", None), EncoderTower) else None
    pad = 0 if encoder is None else encoder.pad_token_id
    pair = [
        Tower("image", image, {"image": example_images(image_size)}),
        Tower("text", text, {"input_ids": _example_ids(length, words, pad)}),
    ]
    config = {
        "class": type(model).__name__,
        "fused": fused,
        "normalize": normalize,
        "context_length": length,
        "vocab_size": words,
        "preprocessing": dict(preprocessing or {}),
    }
    if encoder is None:
        tokenizer = clip_tokenizer_json() if words == CLIP_VOCABULARY else None
    padding = None if tokenizer is None else padding_tokenizer(tokenizer, length, pad)
    return write_programs(pair, folder, format, config, padding, dtype)


def export_text_tower(
    tower: EncoderTower,
    folder: str | Path,
    format: str,
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
    tokenizer: str | None = None,
) -> list[Path]:
    """Write a text tower alone as a program of unit-length features, as `export_towers` does that of a pair.

    Args:
        tower: the tower, in eval mode; it is cast to `dtype`.
        folder: as in `export_towers`.
        format: one that has a file for each tower: `torch_export`, `onnx` or `onnx_int8`.
        max_tokens: tokens of each text, to which the tokenizer pads and cuts.
        dtype: as in `write_programs`.
        tokenizer: its tokenizer as JSON text; None writes none.

    Returns:
        The files.

    Raises:
        UserError: As in `write_programs`.
        OSError: If the files cannot be written.
    """
    pad = tower.pad_token_id
    ids = _example_ids(max_tokens, tower.vocab_size, pad)
    texts = Tower("text", _UnitTexts(tower).requires_grad_(False).eval(), {"input_ids": ids})
    config = {"class": type(tower).__name__, "context_length": max_tokens, "vocab_size": tower.vocab_size}
    padding = None if tokenizer is None else padding_tokenizer(tokenizer, max_tokens, pad)
    return write_programs([texts], folder, format, config, padding, dtype)


class _UnitTexts(nn.Module):
    def __init__(self, tower: EncoderTower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, input_ids: Tensor) -> Tensor:
        features: Tensor = self.tower(input_ids)
        return unit(features).to(features.dtype)


def _example_ids(length: int, vocabulary: int, pad: int) -> Tensor:
    """Return token ids [6, L] to trace with; the start and the end are the highest ids, as CLIP's."""
    ids, mask = example_texts(length, vocabulary, start=vocabulary - 2, end=vocabulary - 1)
    return torch.where(mask.bool(), ids.where(ids != pad, pad + 1), pad)


@torch.no_grad()
def _check_size(image: nn.Module, size: int) -> None:
    try:
        image(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError) as error:
        raise UserError(
            f"Expected the image size that the model was built for, got {size} pixels ({str(error).rstrip('.')}): "
            "correct image_size."
        ) from error
