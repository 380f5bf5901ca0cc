"""Sizes of images and texts that networks accept, compared with those of the data."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning import LightningModule
from torch import Tensor

from ...common.errors import UserError
from .trainers import datamodule_of


class DataSizes(NamedTuple):
    """Sizes that a network accepts; None if it accepts any.

    Args:
        image_size: side S of the images [B, 3, S, S] in pixels.
        vocab_size: number of token ids.
        max_tokens: maximum number of tokens of a text.
    """

    image_size: int | None = None
    vocab_size: int | None = None
    max_tokens: int | None = None


def compare_sizes(module: LightningModule, batch: Any, expected: DataSizes, vocab_is_free: bool = False) -> None:
    """Compare images and token ids of a batch with the sizes that networks accept.

    The command line links the module's sizes to the data's. Modules that are built in Python can have other sizes,
    which would end in an IndexError of an embedding or an error of a library. The largest id is read from the data's
    tokenizer; without a tokenizer, from the batch, for which the host waits for the GPU.

    Args:
        module: the module, whose trainer has the data.
        batch: a dict, as all batches of this package; other types are not checked.
        expected: sizes that the networks accept.
        vocab_is_free: whether the module may have another vocabulary, for the message.

    Raises:
        UserError: If a size does not fit.
    """
    if not isinstance(batch, Mapping):
        return
    for name, value in batch.items():
        if name.startswith("image") and isinstance(value, Tensor) and value.ndim == 4:
            _compare_images(tuple(value.shape[2:]), expected.image_size)
        if (
            name.endswith("input_ids")
            and not name.startswith("teacher")
            and isinstance(value, Tensor)
            and value.numel()
        ):
            _compare_tokens(module, value, expected, vocab_is_free)


def _compare_tokens(module: LightningModule, ids: Tensor, expected: DataSizes, vocab_is_free: bool) -> None:
    tokenizer: Any = getattr(datamodule_of(module), "tokenizer", None)
    entries = len(tokenizer) if hasattr(tokenizer, "__len__") else int(ids.max()) + 1
    if expected.vocab_size is not None and entries > expected.vocab_size:
        advice = f"set the model's vocab_size to {entries}, or " if vocab_is_free else ""
        raise UserError(
            f"Expected token ids below {expected.vocab_size}, the model's vocabulary, got ids up to {entries - 1} in "
            f"the data: {advice}give the data a tokenizer of at most {expected.vocab_size} entries."
        )
    if expected.max_tokens is not None and ids.shape[1] > expected.max_tokens:
        raise UserError(
            f"Expected texts of at most {expected.max_tokens} tokens, the model's positions, got {ids.shape[1]} in the "
            "data: set the data's max_tokens to the model's."
        )


def _compare_images(sides: tuple[int, ...], side: int | None) -> None:
    if side is None or sides == (side, side):
        return
    shown = " x ".join(map(str, sides))
    advice = ""
    if sides[0] == sides[1]:
        advice = f", or the model's to {sides[0]} if the model supports such images"
    raise UserError(
        f"Expected images of {side} x {side} pixels, got {shown} in the data: set the data's image_size to "
        f"{side}{advice}."
    )
