"""A sheet of training samples as the model receives them: after augmentation, normalization and tokenization."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...datamodules.pairs.datamodule import PairDataModule

SAMPLES = 64
GAP = 4
"""Pixels between the images of a sample."""


def samples_of(data: PairDataModule, count: int = SAMPLES) -> list[tuple[Image.Image, str]]:
    """Return the first training samples of an epoch: the augmented images beside each other, and the decoded texts.

    Args:
        data: a datamodule that is set up for fitting; its batch size and workers are changed.
        count: largest number of samples.

    Raises:
        UserError: If the samples cannot be read.
    """
    rows = data.state_dict()["rows"]  # of an epoch
    data.batch_size = max(min(count, rows), 1)
    data.num_workers = 0
    batches = itertools.islice(data.train_dataloader(), 1)
    return [sample for batch in batches for sample in _samples(batch, data)]


def _samples(batch: Mapping[str, torch.Tensor], data: PairDataModule) -> Iterator[tuple[Image.Image, str]]:
    views = [value for value in batch.values() if value.ndim == 4 and value.shape[1] == 3]
    view_pixels = [denormalized(view, data.normalization) for view in views]
    texts = [decoded(batch[name], batch[mask], data) for name, mask in _texts_in(batch)]
    for sample in range(len(batch["sample_index"])):
        image = side_by_side([images[sample] for images in view_pixels])
        yield image, "\n".join(of_key[sample] for of_key in texts)


def _texts_in(batch: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys of token ids and their masks, those of questions and second captions included."""
    names = [name for name in batch if name.endswith("input_ids")]
    return [(name, name.removesuffix("input_ids") + "attention_mask") for name in names]


def denormalized(images: torch.Tensor, normalization: tuple[Sequence[float], Sequence[float]] | None) -> np.ndarray:
    """Return normalized images [B, 3, H, W] as uint8 [B, H, W, 3].

    Args:
        images: floats.
        normalization: mean and standard deviation of the channels; if unknown, each image fills the range of values.
    """
    if normalization is None:
        lowest = images.amin((1, 2, 3), keepdim=True)
        highest = images.amax((1, 2, 3), keepdim=True)
        values = (images - lowest) / (highest - lowest).clamp_min(1e-8)
    else:
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in normalization)
        values = images * std + mean
    pixels: np.ndarray = (values.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return pixels


def decoded(ids: torch.Tensor, mask: torch.Tensor, data: PairDataModule) -> list[str]:
    """Return the texts of token ids [B, L] as the tokenizer decodes them, without [CLS], [SEP] and padding."""
    ends = {data.special_token_ids["cls"], data.special_token_ids["sep"]}
    rows = zip(ids.tolist(), mask.tolist(), strict=True)
    shown = [[token for token, attended in zip(*row, strict=True) if attended and token not in ends] for row in rows]
    return [data.tokenizer.decode(tokens).strip() for tokens in shown]


def side_by_side(images: Sequence[np.ndarray]) -> Image.Image:
    """Return images [H, W, 3] beside each other, with a white gap between."""
    height = max(image.shape[0] for image in images)
    width = sum(image.shape[1] for image in images) + GAP * (len(images) - 1)
    sheet = Image.new("RGB", (width, height), "white")
    x = 0
    for image in images:
        sheet.paste(Image.fromarray(image), (x, 0))
        x += image.shape[1] + GAP
    return sheet
