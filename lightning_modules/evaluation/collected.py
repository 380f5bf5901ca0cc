"""Features of images and texts, collected batch by batch and joined over all processes."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...callbacks.distributed.collectives import gather_uneven
from .retrieval_result import UNKNOWN


class Gathered(NamedTuple):
    """The collected features of all processes, those of rank 0 first."""

    image_features: Tensor  # float32 [I, E]
    image_id: Tensor  # long [I]
    sample_index: Tensor  # long [I]
    text_features: Tensor  # float32 [T, E]
    text_image_id: Tensor  # long [T], id of the image that a text belongs to
    text_id: Tensor  # long [T], equal for equal texts
    text_index: Tensor  # long [T]
    input_ids: Tensor  # long [T, L], padded with 0
    attention_mask: Tensor  # long [T, L]


class CollectedFeatures:
    """Collect features in main memory, so that the memory of a GPU does not limit the size of an evaluation set."""

    def __init__(self) -> None:
        self._images: list[tuple[Tensor, ...]] = []
        self._texts: list[tuple[Tensor, ...]] = []
        self._ids: list[tuple[Tensor, Tensor]] = []

    def add_images(self, features: Tensor, image_id: Tensor, sample_index: Tensor) -> None:
        """Add images: features [B, E], ids and positions long [B]."""
        self._images.append((features.detach().float().cpu(), image_id.cpu(), sample_index.cpu()))

    def add_texts(
        self,
        features: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        image_id: Tensor | None,
        text_id: Tensor | None,
        text_index: Tensor | None,
    ) -> None:
        """Add texts: features [T, E], ids and mask [T, L]; id of the image, of equal texts, and position, long [T]."""
        unknown = torch.full((len(features),), UNKNOWN)
        columns = [unknown if column is None else column.cpu() for column in (image_id, text_id, text_index)]
        self._texts.append((features.detach().float().cpu(), *columns))
        self._ids.append((input_ids.cpu(), attention_mask.cpu()))

    def gather(self, width: int | None = None) -> Gathered:
        """Return the features of all processes; every process must call this.

        Args:
            width: width of the features, if known.
        """
        if width is None:
            # A process without batches gets the width from the others.
            widths = [batches[0][0].shape[1] for batches in (self._images, self._texts) if batches]
            width = int(gather_uneven(torch.tensor([max(widths, default=0)])).max())
        images, texts = _joined(self._images, width, columns=3), _joined(self._texts, width, columns=4)
        return Gathered._make([*images, *texts, *_joined_ids(self._ids)])


def _joined(batches: list[tuple[Tensor, ...]], width: int, columns: int) -> list[Tensor]:
    """Join the batches of this process, then of all processes; the first column contains features, the others ids."""
    if batches:
        own = [torch.cat(column) for column in zip(*batches, strict=True)]
    else:
        own = [torch.zeros(0, width)] + [torch.zeros(0, dtype=torch.long)] * (columns - 1)
    return [gather_uneven(column) for column in own]


def _joined_ids(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return token ids and masks of all processes, padded to the longest text."""
    longest = int(gather_uneven(torch.tensor([max((ids.shape[1] for ids, _ in batches), default=0)])).max())
    none = torch.zeros(0, longest, dtype=torch.long)
    ids, masks = (
        torch.cat([none, *(pad(batch[column], (0, longest - batch[column].shape[1])) for batch in batches)])
        for column in (0, 1)
    )
    return gather_uneven(ids), gather_uneven(masks)
