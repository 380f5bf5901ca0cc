"""Captions of images in a Parquet file."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from ..distributed.collectives import gather_texts
from .rows import PredictionRowsWriter, gather_rows


class CaptionWriter(PredictionRowsWriter):
    """Write `captions.parquet` after `predict`: sample_index, image, image_id, caption.

    `image` is the image's path, or its source and row, from the datamodule's `image_name`, or null.
    The file is written atomically.

    The module's `predict_step` returns `{"sample_index": long [B], "image_id": long [B], "caption": list of B texts}`.

    Args:
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        UserError: If `predict_step` returns something else.
    """

    returned, file, written = ("image_id", "caption"), "captions.parquet", "one caption of each is"

    @override
    def kept(self, outputs: dict[str, Any]) -> tuple[Tensor, list[str]]:
        return outputs["image_id"].cpu(), outputs["caption"]

    @override
    def gathered(self, batches: Sequence[tuple[Tensor, list[str]]]) -> tuple[Tensor, list[str]]:
        ids = gather_rows([ids for ids, _ in batches], torch.zeros(0, dtype=torch.long))
        return ids, gather_texts([text for _, texts in batches for text in texts])

    @override
    def columns(self, gathered: tuple[Tensor, list[str]], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        ids, captions = gathered
        texts = pa.array([captions[place] for place in order.tolist()], "string")
        return {"image_id": ids[order].numpy(), "caption": texts}
