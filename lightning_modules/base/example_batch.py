"""Batches with the shapes of a training, for `vlightning plan`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .method import Method


def image_batch(
    module: Method, rows: int, data: Mapping[str, Any], names: Sequence[str] = ("image",)
) -> dict[str, Tensor]:
    """Return images [rows, 3, S, S] by name, and `image_id`, `label` and `sample_index`, long [rows].

    Args:
        module: The method.
        rows: Rows of the batch.
        data: Arguments of the datamodule. Without `image_size`, S is the module's, else the preset's.
        names: Names of the images.
    """
    preset = 32 if data.get("preset") == "cifar" else 224
    side = data.get("image_size") or module.expected_image_size() or preset
    images = {name: torch.zeros(rows, 3, side, side) for name in names}
    return images | {name: torch.zeros(rows, dtype=torch.long) for name in ("image_id", "label", "sample_index")}


def pair_batch(
    module: Any, rows: int, data: Mapping[str, Any], names: Sequence[str] = ("image",), longest: int | None = None
) -> dict[str, Tensor]:
    """Return an `image_batch` with `input_ids` and `attention_mask`, long [rows, L].

    Args:
        module: The method; it has `text.max_tokens` or `max_tokens`.
        rows: Rows of the batch.
        data: Arguments of the datamodule. Without `max_tokens`, L is the module's.
        names: Names of the images.
        longest: Upper bound of L; None for none.
    """
    length = text_length(module, data)
    length = length if longest is None else min(length, longest)
    texts = {name: torch.zeros(rows, length, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    return image_batch(module, rows, data, names) | texts


def text_length(module: Any, data: Mapping[str, Any]) -> int:
    """Return the number of tokens of a text in the data, else in the module."""
    length = data.get("max_tokens") or getattr(getattr(module, "text", None), "max_tokens", None) or module.max_tokens
    return int(length)
